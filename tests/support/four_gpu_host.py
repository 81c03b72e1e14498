"""A host with four GPUs that do not exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpbench.job import Job, parse_job
from tpbench.launcher import locks
from tpbench.launcher.devices import Device


def job(ranks: int, device: str = "cuda") -> Job:
    """Return a small job with that many ranks."""
    return parse_job({"variant": "triton_tp", "tokens": 64, "vocab": 1000, "tp_size": ranks, "device": device})


def pretend_four_gpus(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Pretend that this host has four GPUs, with a link between 0 and 2 and a link between 1 and 3."""
    monkeypatch.setattr(locks, "FOLDER", folder)
    monkeypatch.setattr(locks, "usable_gpus", lambda: [Device(f"GPU-{each}", str(each)) for each in range(4)])
    pairs = {frozenset(("GPU-0", "GPU-2")): 400.0, frozenset(("GPU-1", "GPU-3")): 400.0}
    monkeypatch.setattr(locks, "links", lambda uuids: pairs)
