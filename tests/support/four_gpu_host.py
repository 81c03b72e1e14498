"""A host with four GPUs that do not exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpbench.job import Job, parse_job
from tpbench.launcher import devices


def job(ranks: int, device: str = "cuda") -> Job:
    """Return a small job with that many ranks."""
    return parse_job({"variant": "triton_tp", "tokens": 64, "vocab": 1000, "tp_size": ranks, "device": device})


def pretend_four_gpus(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Pretend that this host has four GPUs."""
    monkeypatch.setattr(devices, "FOLDER", folder)
    monkeypatch.setattr(devices, "visible_gpus", lambda: [(f"GPU-{each}", str(each)) for each in range(4)])
