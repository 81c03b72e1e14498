"""Limits, peaks and errors of memory, in this process: every test lifts its limit again."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tpbench.measure import machine, memory

CPU = torch.device("cpu")
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
    assert memory.limit(CPU, 0.5, 1) == 0.5
    kept = allocate(2**28)
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        allocate(2**29)
    assert memory.shortage(caught.value) == 2**29
    memory.lift_limit()
    assert allocate(2**29).nbytes == 2 * kept.nbytes


@only_linux
def test_the_default_limit_shares_the_free_memory(limited: None) -> None:
    one, four = (memory.limit(CPU, None, ranks) for ranks in (1, 4))
    assert one == pytest.approx(0.9 * 64) and one / four == pytest.approx(4)


@only_linux
def test_extra_peak_includes_memory_that_is_freed_again() -> None:
    before = torch.ones(2**28, dtype=torch.int8)
    with memory.extra_peak(CPU) as peak:
        temporary = torch.ones(2**28, dtype=torch.int8)
        del temporary
        kept = torch.ones(2**27, dtype=torch.int8)
    assert peak.gib == pytest.approx(0.25, abs=0.02)
    del before, kept


@only_linux
def test_available_bytes_are_within_the_limit_and_the_free_memory(
    limited: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert memory.available_bytes(CPU) == 64 * 2**30
    torch.ones(2**28, dtype=torch.int8)  # stacks of threads are there before the limit
    memory.limit(CPU, 1.0, 1)
    kept = torch.ones(2**28, dtype=torch.int8)
    assert memory.available_bytes(CPU) / 2**30 == pytest.approx(0.75, abs=0.05)
    monkeypatch.setattr(machine, "available_memory_gib", lambda: 0.5)
    assert memory.available_bytes(CPU) / 2**30 == 0.5
    del kept


@pytest.mark.parametrize(
    ("error", "requested_bytes"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB. GPU 0 has a total"), 7 * 2**30),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."), 20 * 2**20),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."), 4096),
        (RuntimeError("NCCL error: Cuda failure 2 'out of memory'"), 0),
        (MemoryError(), 0),
        (RuntimeError("shape mismatch"), None),
        (ValueError("out of memory of my cat"), None),
    ],
)
def test_shortage(error: Exception, requested_bytes: int | None) -> None:
    assert memory.shortage(error) == requested_bytes


def test_shortage_of_numpy() -> None:
    with pytest.raises(MemoryError) as caught:
        np.empty((2**40, 2**10), dtype=np.float32)
    assert memory.shortage(caught.value) == 2**52
