"""Which processes may run other tasks, and why the others end."""

import random
from collections.abc import Callable, Sequence
from typing import Any

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


def test_every_task_begins_with_the_same_random_numbers() -> None:
    drawn = []
    for _ in range(2):
        reset_random_numbers()
        drawn.append((random.random(), float(torch.rand(()))))
    assert drawn[0] == drawn[1]


def test_every_task_may_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch compiles a function for a few shapes only, here for one, and then runs it without compiling."""
    monkeypatch.setattr("torch._dynamo.config.recompile_limit", 1)
    shapes: list[int] = []

    def backend(graph: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
        shapes.append(len(inputs[-1]))
        return graph

    compiled = torch.compile(lambda tensor: tensor + 1, backend=backend, dynamic=False)
    for size in (2, 3, 4):
        begin_tasks()
        compiled(torch.ones(size))
    assert shapes == [2, 3, 4]


@pytest.mark.parametrize(
    ("free_mib", "allocated_mib", "reason"),
    [
        ([9000, 7000, 6952], 16, ""),
        ([9000, 7000, 6900], 16, "its jobs took 2100 MiB of the GPU that they did not give back"),
        ([9000], 17, "tensors of 17.0 MiB are left"),
    ],
)
def test_how_much_of_a_gpu_jobs_may_keep(
    free_mib: list[int], allocated_mib: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = iter(free_mib)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free) * 2**20, 80_000 * 2**20))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated_mib * 2**20)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *device: None)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    monkeypatch.setattr(gpu_trace, "has_run", False)
    monkeypatch.setattr(process, "_free_bytes", {})
    assert [reason_to_end(torch.device("cuda:0")) for _ in free_mib][-1] == reason
