"""Limits, peaks and errors of memory, in this process: every test lifts its limit again."""

import math
import resource
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tpbench.measure import machine, rank_memory

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)
GIB = 2**30
only_linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux limits the data segment and keeps a peak")


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """64 GiB of free memory, and no limit after the test.

    One thread, as in a worker: a limit counts 8 MiB of stack for each thread that torch starts after it is set.
    """
    monkeypatch.setattr(machine, "available_memory_gib", lambda: 64.0)
    before, threads = resource.getrlimit(resource.RLIMIT_DATA), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    resource.setrlimit(resource.RLIMIT_DATA, before)


@only_linux
@pytest.mark.parametrize(
    "allocate",
    [lambda size: torch.empty(size, dtype=torch.int8), lambda size: np.zeros(size, dtype=np.int8)],
    ids=["torch", "numpy"],
)
def test_beyond_the_limit_an_allocation_raises_and_the_process_goes_on(
    allocate: Callable[[int], Any], limited: None
) -> None:
    assert rank_memory.limit(CPU, 0.5, 1) == 0.5
    kept = allocate(2**28)
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        allocate(2**29)
    assert rank_memory.shortage(caught.value) == 2**29
    rank_memory.lift_limit()
    assert allocate(2**29).nbytes == 2 * kept.nbytes


@only_linux
def test_the_default_limit_shares_the_free_memory(limited: None) -> None:
    one, four = (rank_memory.limit(CPU, None, ranks) for ranks in (1, 4))
    assert one == pytest.approx(0.9 * 64) and one / four == pytest.approx(4)


@only_linux
def test_available_bytes_are_within_the_limit_and_the_free_memory(
    limited: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rank_memory.available_bytes(CPU) == 64 * GIB
    torch.ones(2**28, dtype=torch.int8)  # stacks of threads are there before the limit
    rank_memory.limit(CPU, 1.0, 1)
    kept = torch.ones(2**28, dtype=torch.int8)
    assert rank_memory.available_bytes(CPU) / GIB == pytest.approx(0.75, abs=0.05)
    monkeypatch.setattr(machine, "available_memory_gib", lambda: 0.5)
    assert rank_memory.available_bytes(CPU) / GIB == 0.5
    del kept


@pytest.mark.parametrize(
    ("error", "requested_bytes"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB. GPU 0 has a total"), 7 * GIB),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 MiB."), 5 * 2**19),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."), 4096),
        (RuntimeError("NCCL error: Cuda failure 2 'out of memory'"), 0),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), 0),
        (MemoryError(), 0),
        (RuntimeError("shape mismatch"), None),
        (ValueError("out of memory of my cat"), None),
    ],
)
def test_shortage(error: Exception, requested_bytes: int | None) -> None:
    assert rank_memory.shortage(error) == requested_bytes


@pytest.mark.parametrize(("wanted", "limit", "fraction"), [(None, 100.0, 1.0), (25.0, 25.0, 0.25), (400.0, 100.0, 1.0)])
def test_the_limit_of_a_gpu_is_a_fraction_of_its_memory(
    wanted: float | None, limit: float, fraction: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    fractions = [1.0]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=100 * GIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, _: fractions.append(share))
    assert (rank_memory.limit(CUDA, wanted, 8), fractions[-1]) == (limit, fraction)


@pytest.mark.parametrize(("free", "available"), [(100, 40), (1, 1)])
def test_available_bytes_of_a_gpu_are_within_its_limit_and_its_free_memory(
    free: int, available: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free * GIB, 100 * GIB))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 0.5)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 10 * GIB)
    assert rank_memory.available_bytes(CUDA) == available * GIB


@only_linux
def test_a_peak_on_a_cpu_includes_memory_that_is_freed_again() -> None:
    usage = rank_memory.IterationMemory(CPU, rank_memory.held_bytes(CPU))
    usage.begin()
    kept = torch.ones(2**26, dtype=torch.int8)
    torch.ones(2**27, dtype=torch.int8)
    usage.end()
    assert usage.held_gib == [pytest.approx(2**-4, abs=0.01)] and usage.peak_gib == [pytest.approx(3 / 16, abs=0.01)]
    with rank_memory.extra_peak(CPU) as peak:
        torch.ones(2**28, dtype=torch.int8)
        more = torch.ones(2**27, dtype=torch.int8)
    assert peak.peak_gib == [pytest.approx(0.25, abs=0.02)]
    del kept, more


def test_without_proc_memory_is_not_known(monkeypatch: pytest.MonkeyPatch, limited: None) -> None:
    def none(path: str) -> Any:
        raise OSError

    monkeypatch.setattr(rank_memory, "Path", none)
    assert rank_memory.held_bytes(CPU) == 0
    with rank_memory.extra_peak(CPU) as peak:
        pass
    usage = rank_memory.IterationMemory(CPU, 0)
    usage.begin()
    usage.end()
    assert all(map(math.isnan, [*peak.peak_gib, *usage.held_gib, *usage.peak_gib]))
    assert rank_memory.limit(CPU, 3.0, 1) == 3.0
    assert rank_memory.available_bytes(CPU) == 64 * GIB
