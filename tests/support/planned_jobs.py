"""Jobs that are planned but never run."""

from __future__ import annotations

from typing import Any

from tpbench.job import Job, parse_job

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
