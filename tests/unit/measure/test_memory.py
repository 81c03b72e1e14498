"""Limits, peaks and errors of memory, in this process: every test lifts its limit again."""

from __future__ import annotations

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
def test_extra_peak_includes_memory_that_is_freed_again() -> None:
    before = torch.ones(2**28, dtype=torch.int8)
    with rank_memory.extra_peak(CPU) as peak:
        temporary = torch.ones(2**28, dtype=torch.int8)
        del temporary
        kept = torch.ones(2**27, dtype=torch.int8)
    assert peak.gib == pytest.approx(0.25, abs=0.02)
    del before, kept


@only_linux
def test_available_bytes_are_within_the_limit_and_the_free_memory(
    limited: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rank_memory.available_bytes(CPU) == 64 * 2**30
    torch.ones(2**28, dtype=torch.int8)  # stacks of threads are there before the limit
    rank_memory.limit(CPU, 1.0, 1)
    kept = torch.ones(2**28, dtype=torch.int8)
    assert rank_memory.available_bytes(CPU) / 2**30 == pytest.approx(0.75, abs=0.05)
    monkeypatch.setattr(machine, "available_memory_gib", lambda: 0.5)
    assert rank_memory.available_bytes(CPU) / 2**30 == 0.5
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
    assert rank_memory.shortage(error) == requested_bytes


def test_shortage_of_numpy() -> None:
    with pytest.raises(MemoryError) as caught:
        np.empty((2**40, 2**10), dtype=np.float32)
    assert rank_memory.shortage(caught.value) == 2**52


@pytest.mark.parametrize(
    ("unit", "size"), [("bytes", 1), ("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30), ("TiB", 2**40)]
)
def test_units_of_a_shortage(unit: str, size: int) -> None:
    assert rank_memory.shortage(torch.OutOfMemoryError(f"Tried to allocate 2.50 {unit}.")) == int(2.5 * size)


CUDA = torch.device("cuda", 1)


class FakeMemory:
    """The memory of a GPU of 100 GiB."""

    def __init__(self) -> None:
        self.fraction, self.held, self.peak, self.reserved, self.free = 1.0, 0, 0, 0, 100 * 2**30
        self.calls: list[str] = []

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("get_device_properties", "set_per_process_memory_fraction", "get_per_process_memory_fraction",
                     "mem_get_info", "memory_reserved", "memory_allocated", "max_memory_allocated",
                     "reset_peak_memory_stats", "synchronize"):  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def get_device_properties(self, device: torch.device) -> Any:
        return SimpleNamespace(total_memory=100 * 2**30)

    def set_per_process_memory_fraction(self, fraction: float, device: torch.device) -> None:
        self.fraction = fraction

    def get_per_process_memory_fraction(self, device: torch.device) -> float:
        return self.fraction

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.free, 100 * 2**30

    def memory_reserved(self, device: torch.device) -> int:
        return self.reserved

    def memory_allocated(self, device: torch.device) -> int:
        return self.held

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.peak

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak = self.held
        self.calls.append("reset")

    def synchronize(self, device: torch.device) -> None:
        self.calls.append("synchronize")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeMemory:
    found = FakeMemory()
    found.patch(monkeypatch)
    return found


@pytest.mark.parametrize(("wanted", "limit", "fraction"), [(None, 100.0, 1.0), (25.0, 25.0, 0.25), (400.0, 100.0, 1.0)])
def test_the_limit_of_a_gpu_is_a_fraction_of_its_memory(
    wanted: float | None, limit: float, fraction: float, gpu: FakeMemory
) -> None:
    assert rank_memory.limit(CUDA, wanted, 8) == limit
    assert gpu.fraction == fraction


def test_available_bytes_of_a_gpu_are_within_its_limit_and_its_free_memory(gpu: FakeMemory) -> None:
    gpu.fraction, gpu.reserved = 0.5, 10 * 2**30
    assert rank_memory.available_bytes(CUDA) == 40 * 2**30
    gpu.free = 2**30
    assert rank_memory.available_bytes(CUDA) == 2**30


def test_a_peak_on_a_gpu_is_above_what_was_held(gpu: FakeMemory) -> None:
    gpu.held = gpu.peak = 3 * 2**30
    assert rank_memory.held_bytes(CUDA) == 3 * 2**30
    with rank_memory.extra_peak(CUDA) as peak:
        assert math.isnan(peak.gib)
        gpu.peak = 5 * 2**30
    assert peak.gib == 2.0
    assert gpu.calls == ["synchronize", "synchronize", "reset", "synchronize"]


def test_memory_of_iterations_on_a_gpu(gpu: FakeMemory) -> None:
    usage = rank_memory.IterationMemory(CUDA, 2**30)
    usage.end()
    for held, most in ((2, 4), (0, 3)):
        usage.begin()
        gpu.held, gpu.peak = held * 2**30, most * 2**30
    usage.end()
    usage.end()
    assert (usage.held_gib, usage.peak_gib) == ([1.0, 0.0], [3.0, 2.0])
    assert "synchronize" not in gpu.calls and gpu.calls == ["reset", "reset"]


@only_linux
def test_memory_of_iterations_on_a_cpu() -> None:
    usage = rank_memory.IterationMemory(CPU, rank_memory.held_bytes(CPU))
    usage.begin()
    kept = torch.ones(2**26, dtype=torch.int8)
    torch.ones(2**27, dtype=torch.int8)
    usage.end()
    assert usage.held_gib == [pytest.approx(2**-4, abs=0.01)] and usage.peak_gib == [pytest.approx(3 / 16, abs=0.01)]
    del kept


def test_without_proc_memory_is_not_known(monkeypatch: pytest.MonkeyPatch, limited: None) -> None:
    def none(path: str) -> Any:
        raise OSError

    monkeypatch.setattr(rank_memory, "Path", none)
    assert rank_memory.held_bytes(CPU) == 0
    with rank_memory.extra_peak(CPU) as peak:
        pass
    assert math.isnan(peak.gib)
    usage = rank_memory.IterationMemory(CPU, 0)
    usage.begin()
    usage.end()
    assert [math.isnan(each) for each in usage.held_gib + usage.peak_gib] == [True, True]
    assert rank_memory.limit(CPU, 3.0, 1) == 3.0
    assert rank_memory.available_bytes(CPU) == 64 * 2**30


@only_linux
def test_a_limit_stays_below_one_that_cannot_be_raised(limited: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: seen.append(limits))
    used = rank_memory._status_bytes("VmData")
    for hard in (resource.RLIM_INFINITY, 2**40, 4096):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, hard=hard: (hard, hard))
        rank_memory.limit(CPU, 1.0, 1)
    (soft, _), (below, _), (capped, most) = seen
    assert used <= soft - 2**30 < used + 2**26 and used <= below - 2**30 < used + 2**26 and capped == most == 4096


def test_only_a_gpus_freed_memory_is_filled_with_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[Any] = []
    monkeypatch.setattr(torch, "full", lambda *arguments, **options: filled.append((*arguments, options["dtype"])))
    rank_memory.fill_freed_with_nan(CPU, 1.0)
    rank_memory.fill_freed_with_nan(CUDA, 0.0)
    assert filled == []
    rank_memory.fill_freed_with_nan(CUDA, 0.5)
    assert filled == [((2**29,), 0xFF, torch.uint8)]
    assert torch.tensor([0xFF] * 8, dtype=torch.uint8).view(torch.bfloat16).isnan().all()
