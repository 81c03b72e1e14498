"""Launches of kernels that cost the host little time, and the resources of what was launched."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from triton import JITFunction, knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver

INTERPRETED: bool = knobs.runtime.interpret
"""True if the kernels run in Triton's interpreter: TRITON_INTERPRET was 1 when triton was imported."""
MOST_REMEMBERED = 256
WARP = 32
_REGISTER_UNIT = 256
"""A warp gets its registers in units of this size (CUDA occupancy calculator, compute capability 5.0 and later)."""
_QUARTERS = 4
"""Partitions of a multiprocessor, each with its own registers and warps."""
_RESERVED_BYTES = 1024
"""Shared memory that each program costs in addition to its own (compute capability 8.0 and later)."""


class Remembered(dict[Any, Any]):
    """A dict that forgets all if it becomes large, because the number of rows may differ by call."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if len(self) >= MOST_REMEMBERED:
            self.clear()
        super().__setitem__(key, value)


class CachedLaunch:
    """`kernel[(programs,)](*arguments, **constants)`, with far less host time from the second call of a kind on.

    On every call Triton examines every argument for what the kernel may be specialised for. A compiled kernel can be
    launched directly, which is right for arguments of the same kind: of equal integers, and pointers of the same dtype
    and alignment on the same device. That is stricter than Triton, which never specialises for the value of a float.

    The kernel's parameters must come in the order of `__call__`; then its constants.
    """

    def __init__(self, kernel: Any, **constants: Any) -> None:
        self.kernel = kernel
        self.constants = constants
        # A compiled kernel also accepts its constants in their places, and ignores them.
        self.constants_in_place = tuple(constants[name] for name in kernel.arg_names if name in constants)
        self._compiled: dict[Any, CompiledKernel] = Remembered()

    def __call__(
        self, programs: int, pointers: tuple[Any, ...], integers: tuple[Any, ...], floats: tuple[float, ...] = (),
        more_integers: tuple[int, ...] = (),
    ) -> Any:  # fmt: skip
        """Queue the kernel on the current stream of the current device. Return what Triton compiled, or None.

        A named tuple of tensors, integers or floats is one argument of the kernel.
        """
        # Triton would compile an integer among the floats as an integer.
        numbers = map(float, floats)
        floats = (floats._make(numbers),) if hasattr(floats, "_make") else tuple(numbers)
        arguments = (*pointers, *integers, *floats, *more_integers)
        if not isinstance(self.kernel, JITFunction):  # Triton's interpreter
            return self.kernel[(programs,)](*arguments, **self.constants)
        alike = tuple([_kind_of_pointer(pointer) for pointer in pointers])
        kind = (driver.active.get_current_device(), alike, integers, more_integers)
        compiled = self._compiled.get(kind)
        if compiled is not None:
            compiled[programs, 1, 1](*arguments, *self.constants_in_place)
            return compiled
        compiled = self.kernel[(programs,)](*arguments, **self.constants)
        if isinstance(compiled, CompiledKernel):  # asynchronous compilation returns a future instead
            self._compiled[kind] = compiled
        return compiled


def _kind_of_pointer(pointer: Any) -> Any:
    """Return what Triton specialises a kernel for."""
    if pointer is None:
        return None
    if isinstance(pointer, Tensor):
        return pointer.dtype, pointer.data_ptr() % 16 == 0
    return tuple([None if element is None else _kind_of_pointer(element) for element in pointer])


cached_launch = functools.lru_cache(maxsize=256)(CachedLaunch)
"""Return the one `CachedLaunch` of a kernel with these constants."""


def launching(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context for kernel launches: Triton launches on the current device, not on that of the tensors."""
    if INTERPRETED:
        # Masked elements compute with -inf, of which numpy, the interpreter's backend, would warn.
        return importlib.import_module("numpy").errstate(all="ignore")  # type: ignore[no-any-return]
    return torch.cuda.device(device.index)  # torch takes 2 us to find the number of a torch.device


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
