"""Which processes may run other tasks, and why the others end."""

import random

import pytest
import torch

from tpbench.measure import gpu_trace
from tpbench.worker import process
from tpbench.worker.process import begin_tasks, reason_to_end, reset_random_numbers


def test_a_process_that_profiled_a_gpu_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_trace, "has_run", False)
    here = torch.device("cpu")
    assert reason_to_end(here) == ""
    monkeypatch.setattr(gpu_trace, "has_run", True)
    assert reason_to_end(here).startswith("a profiler has run on its GPU")


def test_every_task_begins_with_the_same_random_numbers_and_may_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(7)
    drawn = []
    for _ in range(2):
        begin_tasks()
        reset_random_numbers()
        drawn.append((random.random(), float(torch.rand(()))))
    assert drawn[0] == drawn[1]


class Gpu:
    """A fake GPU. `free`: MiB that are free at each call; the last value stays."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *free: int, allocated: int = 0) -> None:
        self.free = list(free)
        monkeypatch.setattr(torch.cuda, "mem_get_info", self.info)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated * 2**20)
        for name in ("synchronize", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, lambda *device: None)
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
        monkeypatch.setattr(gpu_trace, "has_run", False)
        monkeypatch.setattr(process, "_free_bytes", {})

    def info(self, device: object) -> tuple[int, int]:
        return (self.free.pop(0) if len(self.free) > 1 else self.free[0]) * 2**20, 80_000 * 2**20


def test_how_much_of_a_gpu_jobs_may_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpu(monkeypatch, 9000, 7000, 6900)
    reasons = [reason_to_end(torch.device("cuda:0")) for _ in range(3)]
    assert reasons == ["", "", "its jobs took 2100 MiB of the GPU that they did not give back"]


def test_tensors_that_are_left_end_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpu(monkeypatch, 9000, allocated=17)
    assert reason_to_end(torch.device("cuda:0")) == "tensors of 17.0 MiB are left"
