"""Jobs that are planned but never run, and a host with four GPUs that do not exist."""

from pathlib import Path
from typing import Any

import pytest

from tpbench.job import Job, parse_job
from tpbench.launcher import devices

MODEL = {
    "architecture": "llama", "hidden_size": 64, "ffn_size": 96, "layers": 2, "heads": 4, "kv_heads": 4, "head_dim": 16,
    "vocab": 128,
}  # fmt: skip


def job(variant: str = "triton_tp", **values: Any) -> Job:
    """Return an entropy loss of 4096 tokens on four GPUs."""
    plain = {"tokens": 4096, "vocab": 131072, "tp_size": 4, "device": "cuda", "loss": "cross_entropy"}
    return parse_job({"variant": variant, **plain, **values})


def train_job(**values: Any) -> Job:
    """Return a train step, whose problem fixes the number of iterations."""
    plain = {"variant": "fsdp", "model": "large", "tp_size": 1, "dp_size": 4, "device": "cpu"}
    return parse_job({**MODEL, **plain, **values})


def pretend_four_gpus(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Pretend that this host has four GPUs, whose locks are in the folder."""
    monkeypatch.setattr(devices, "FOLDER", folder)
    monkeypatch.setattr(devices, "visible_gpus", lambda: [(f"GPU-{each}", str(each)) for each in range(4)])
