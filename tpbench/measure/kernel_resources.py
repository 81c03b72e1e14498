"""The resources of a multiprocessor that compiled kernels take."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

WARP = 32
_REGISTER_UNIT = 256
"""A warp gets its registers in units of this size (CUDA occupancy calculator, compute capability 5.0 and later)."""
_QUARTERS = 4
"""Partitions of a multiprocessor, each with its own registers and warps."""
_RESERVED_BYTES = 1024
"""Shared memory that each program costs in addition to its own (compute capability 8.0 and later)."""


def occupancy(registers: int, shared_bytes: int, warps: int, on: Any) -> float:
    """Return the share of a multiprocessor's warps that such programs can fill. on: the properties of the GPU."""
    warp_registers = -(-max(1, registers) * WARP // _REGISTER_UNIT) * _REGISTER_UNIT
    by_registers = on.regs_per_multiprocessor // _QUARTERS // warp_registers * _QUARTERS // warps
    by_threads = on.max_threads_per_multi_processor // (WARP * warps)
    by_shared = on.shared_memory_per_multiprocessor // (shared_bytes + _RESERVED_BYTES)
    return float(min(by_registers, by_threads, by_shared) * warps * WARP / on.max_threads_per_multi_processor)


def worst_resources(kernels: Iterable[Any], device: torch.device) -> dict[str, float]:
    """Return the worst resources of compiled kernels by name, or none if Triton compiled none.

    Registers and spilled_bytes of local memory are of a thread, shared_kib of a program. occupancy: the share of a
    multiprocessor's warps that can run at the same time. kernels: what launches return, None in the interpreter.
    """
    compiled = [kernel for kernel in kernels if kernel is not None]
    if not compiled:
        return {}
    on = torch.cuda.get_device_properties(device)
    shapes = [(kernel.n_regs, kernel.metadata.shared, kernel.metadata.num_warps) for kernel in compiled]
    return {
        "registers": max(registers for registers, _, _ in shapes),
        "spilled_bytes": max(4 * kernel.n_spills for kernel in compiled),  # Triton counts words of local memory
        "shared_kib": max(shared for _, shared, _ in shapes) / 1024,
        "occupancy": min(occupancy(*shape, on) for shape in shapes),
    }
