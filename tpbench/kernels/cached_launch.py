"""Launches of kernels that cost the host little time."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import JITFunction, knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver

INTERPRETED: bool = knobs.runtime.interpret
"""True if the kernels run in Triton's interpreter: TRITON_INTERPRET was 1 when triton was imported."""
MOST_REMEMBERED = 256


class Remembered(dict[Any, Any]):
    """A dict that forgets all if it becomes large, because the number of rows may differ by call."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if len(self) >= MOST_REMEMBERED:
            self.clear()
        super().__setitem__(key, value)


class Form(NamedTuple):
    """The properties of a tensor that decide how a kernel is launched: all but its values and its address."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    misaligned: int
    """Bytes past a multiple of 16."""

    @property
    def aligned(self) -> bool:
        """True if all rows are contiguous, consist of whole 16-byte vectors, and start at multiples of 16 bytes."""
        sizes = (size * self.dtype.itemsize for size in (self.shape[1], self.strides[0]))
        return self.strides[1] == 1 and not self.misaligned and all(size % 16 == 0 for size in sizes)


def form(tensor: Tensor) -> Form:
    return Form(tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % 16)


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
        arguments = (*pointers, *_numbers(integers, floats, more_integers))
        if not isinstance(self.kernel, JITFunction):  # Triton's interpreter
            return self.kernel[(programs,)](*arguments, **self.constants)
        alike = tuple([_kind_of_pointer(pointer) for pointer in pointers])
        kind = (device := driver.active.get_current_device(), alike, integers, more_integers)
        compiled = self._compiled.get(kind)
        if compiled is not None:
            stream = driver.active.get_current_stream(device)
            compiled[programs, 1, 1](*arguments, *self.constants_in_place, stream=stream)
            return compiled
        compiled = self.kernel[(programs,)](*arguments, **self.constants)
        if isinstance(compiled, CompiledKernel):  # asynchronous compilation returns a future instead
            self._compiled[kind] = compiled
        return compiled

    def bound(self, programs: int, *numbers: tuple[Any, ...]) -> Callable[..., Any]:
        """Return a launch that takes the pointers alone: each time of the same kinds, on the same device."""
        after_pointers = (*_numbers(*numbers), *self.constants_in_place)
        compiled, again, device = None, None, 0

        def launch(*pointers: Any) -> Any:
            nonlocal compiled, again, device
            if again is not None:
                again(*pointers, *after_pointers, stream=driver.active.get_current_stream(device))
                return compiled
            compiled = self(programs, pointers, *numbers)
            if isinstance(compiled, CompiledKernel):
                again, device = compiled[programs, 1, 1], driver.active.get_current_device()
            return compiled

        return launch


def _numbers(integers: Iterable[Any], floats: Any = (), more_integers: Iterable[int] = ()) -> tuple[Any, ...]:
    """Return the arguments after the pointers. Triton would compile an integer among the floats as an integer."""
    given = map(float, floats)
    return (*integers, *((floats._make(given),) if hasattr(floats, "_make") else given), *more_integers)


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
