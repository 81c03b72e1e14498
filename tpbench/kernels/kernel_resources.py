"""Registers, spills, shared memory and occupancy of compiled kernels: they tell why one tile is slower than another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

WARP = 32
_REGISTER_UNIT = 256
"""A warp gets its registers in units of this size (CUDA occupancy calculator, compute capability 5.0 and later)."""
_QUARTERS = 4
"""Partitions of a multiprocessor, each with its own registers and warps."""
_RESERVED_BYTES = 1024
"""Shared memory that each program costs in addition to its own (compute capability 8.0 and later)."""


@dataclass(frozen=True)
class Multiprocessor:
    """The resources of a multiprocessor that programs share."""

    registers: int
    threads: int
    shared_bytes: int


@dataclass(frozen=True)
class KernelResources:
    """The resources of one kernel, or of several kernels the worst value in each respect."""

    registers: int
    """Registers per thread."""
    spilled_bytes: int
    """Local memory per thread: registers that did not fit, and arrays with a variable index."""
    shared_bytes: int
    """Shared memory per program."""
    occupancy: float
    """Warps that can run at the same time, as a share of those that a multiprocessor has room for."""


def occupancy(registers: int, shared_bytes: int, warps: int, on: Multiprocessor) -> float:
    """Return the share of a multiprocessor's warps that programs with these registers and shared bytes can fill."""
    warp_registers = -(-max(1, registers) * WARP // _REGISTER_UNIT) * _REGISTER_UNIT
    by_registers = on.registers // _QUARTERS // warp_registers * _QUARTERS // warps
    by_threads = on.threads // (WARP * warps)
    by_shared = on.shared_bytes // (shared_bytes + _RESERVED_BYTES)
    return min(by_registers, by_threads, by_shared) * warps * WARP / on.threads


def worst_resources(kernels: Iterable[Any], device: torch.device) -> KernelResources | None:
    """Return the worst resources of compiled kernels, or None if Triton compiled none.

    kernels: what launches return, each None in Triton's interpreter.
    """
    compiled = [each for each in kernels if each is not None]
    if not compiled:
        return None
    limits: Any = torch.cuda.get_device_properties(device)  # torch's stub lacks the registers
    on = Multiprocessor(
        limits.regs_per_multiprocessor,
        limits.max_threads_per_multi_processor,
        limits.shared_memory_per_multiprocessor,
    )
    shapes = [(each.n_regs, each.metadata.shared, each.metadata.num_warps) for each in compiled]
    return KernelResources(
        registers=max(registers for registers, _, _ in shapes),
        spilled_bytes=max(4 * each.n_spills for each in compiled),  # Triton counts words of local memory
        shared_bytes=max(shared for _, shared, _ in shapes),
        occupancy=min(occupancy(*shape, on) for shape in shapes),
    )
