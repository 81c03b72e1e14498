"""What the compiler made of a kernel, as far as it tells why one tile is slower than another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

WARP = 32
_REGISTER_UNIT = 256
"""Registers are handed out to a warp in such pieces (CUDA occupancy calculator, compute capability 5.0 and later)."""
_QUARTERS = 4
"""Parts of a multiprocessor, each with its own registers and warps."""
_RESERVED_BYTES = 1024
"""Shared memory that each program costs besides its own (compute capability 8.0 and later)."""


@dataclass(frozen=True)
class Multiprocessor:
    """What programs share."""

    registers: int
    threads: int
    shared_bytes: int


@dataclass(frozen=True)
class Compiled:
    """One kernel, or the worst of several in each respect."""

    registers: int
    """A thread."""
    spilled_bytes: int
    """A thread, of local memory: registers that did not fit, and arrays that are indexed."""
    shared_bytes: int
    """A program."""
    occupancy: float
    """Resident warps over those that a multiprocessor has room for."""


def occupancy(registers: int, shared_bytes: int, warps: int, on: Multiprocessor) -> float:
    """The share of a multiprocessor's warps that programs of so many registers a thread and shared bytes can fill."""
    a_warp = -(-max(1, registers) * WARP // _REGISTER_UNIT) * _REGISTER_UNIT
    by_registers = on.registers // _QUARTERS // a_warp * _QUARTERS // warps
    by_threads = on.threads // (WARP * warps)
    by_shared = on.shared_bytes // (shared_bytes + _RESERVED_BYTES)
    return min(by_registers, by_threads, by_shared) * warps * WARP / on.threads


def worst(kernels: Iterable[Any], device: torch.device) -> Compiled | None:
    """Of kernels as Triton's launches return them: None where it compiled none, as in its interpreter."""
    launched = [each for each in kernels if each is not None]
    if not launched:
        return None
    limits: Any = torch.cuda.get_device_properties(device)  # torch's stub lacks the registers
    on = Multiprocessor(
        limits.regs_per_multiprocessor,
        limits.max_threads_per_multi_processor,
        limits.shared_memory_per_multiprocessor,
    )
    shapes = [(each.n_regs, each.metadata.shared, each.metadata.num_warps) for each in launched]
    return Compiled(
        registers=max(registers for registers, _, _ in shapes),
        spilled_bytes=max(4 * each.n_spills for each in launched),  # Triton counts words of local memory
        shared_bytes=max(shared for _, shared, _ in shapes),
        occupancy=min(occupancy(*shape, on) for shape in shapes),
    )
