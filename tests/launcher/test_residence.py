"""Which processes may stay for another job, and what ends the others."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch

from tests.launcher.rows import cell
from tpbench.launcher.warm import may_stay
from tpbench.residence import Residence, State


def test_what_a_job_changed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    before = State.now()
    assert before.changed(State.now()) == ""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/where-torch-puts-it")
    assert before.changed(State.now()) == ""
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", not torch.backends.cudnn.benchmark)
    assert before.changed(State.now()) == "NCCL_ALGO, torch's settings"


def test_why_a_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    residence, here = Residence(), torch.device("cpu")
    residence.settled()
    assert residence.ends_because(here) == "each job has a process of its own"
    residence.welcome = True
    assert residence.ends_because(here) == ""
    monkeypatch.delenv(next(iter(os.environ)))
    assert residence.ends_because(here).startswith("the job changed ")
    assert residence.jobs == 3


@pytest.mark.parametrize(
    ("variant", "stays"),
    [("triton_tp", True), ("pytorch_gather", True), ("sparse_symmetric", True), ("liger", False), ("autotp", False)],
)
def test_who_may_stay_on_gpus(variant: str, stays: bool, tmp_path: Path) -> None:
    job = cell(0, tmp_path).job
    assert may_stay(dataclasses.replace(job, variant=variant)) is stays
    assert not may_stay(dataclasses.replace(job, variant=variant, device="cpu"))
    assert not may_stay(dataclasses.replace(job, variant=variant, memory_limit_gib=1.0))
