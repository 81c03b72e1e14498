"""Kernel launches that cost the host little time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from triton import JITFunction, knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

MOST_REMEMBERED = 256
"""Most kinds of arguments that one launch remembers. This bounds memory: the number of rows may differ by call."""


class CachedLaunch:
    """`kernel[(programs,)](*arguments, **constants)`, with far less host time from the second call of a kind on.

    On every call Triton examines every argument for properties that the kernel may be specialised for: dtypes, the
    alignment of addresses to 16 bytes, integers, constants, options. A compiled kernel can also be launched directly
    (`compiled[grid](*arguments)`, as in Triton's tutorial on fused softmax). This is right for arguments of the same
    kind. Here two calls are of one kind if they have equal integers, pointers of the same dtype and alignment, and the
    same device. That is stricter than Triton, which never specialises for the value of a float. The constants, some of
    which are launch options, belong to one `CachedLaunch`.

    The kernel's parameters must come in the order of `__call__`, or as `arrange` returns them; then its constants.
    """

    def __init__(self, kernel: Any, **constants: Any) -> None:
        self.kernel = kernel
        self.constants = constants
        # A compiled kernel also accepts its constants in their places, and ignores them.
        self.constants_in_place = tuple(constants[name] for name in kernel.arg_names if name in constants)
        self._compiled: dict[Any, CompiledKernel] = {}

    def __call__(
        self, programs: int, pointers: tuple[Tensor | TensorDescriptor | None, ...], integers: tuple[Any, ...],
        floats: tuple[float, ...] = (), more_integers: tuple[int, ...] = (),
        arrange: Callable[..., tuple[Any, ...]] | None = None, varying: tuple[int, ...] = (),
    ) -> Any:  # fmt: skip
        """Queue the kernel on the current stream of the current device.

        Args:
            pointers: tensors, descriptors of tensors, or None.
            integers: may contain named tuples of integers.
            arrange: makes the kernel's arguments from the other four tuples, where some of them are named tuples.
            varying: integers at the end. The kernel lists them in `do_not_specialize`, so one compiled kernel serves
                all their values of one width (32 or 64 bits).

        Returns the kernel that Triton compiled, or None in Triton's interpreter.
        """
        # Triton would compile an integer among the floats as an integer.
        floats = tuple(map(float, floats))
        if arrange is None:
            arguments = (*pointers, *integers, *floats, *more_integers, *varying)
        else:
            arguments = arrange(pointers, integers, floats, more_integers)
        if not unobserved(self.kernel):
            return self.kernel[(programs,)](*arguments, **self.constants)
        alike = tuple([_kind_of_pointer(each) for each in pointers])
        widths = tuple([each.bit_length() // 32 for each in varying])  # Triton passes 32 bits if they suffice
        kind = (driver.active.get_current_device(), alike, integers, more_integers, widths)
        compiled = self._compiled.get(kind)
        if compiled is not None:
            compiled[programs, 1, 1](*arguments, *self.constants_in_place)
            return compiled
        compiled = self.kernel[(programs,)](*arguments, **self.constants)
        if isinstance(compiled, CompiledKernel):  # asynchronous compilation returns a future instead
            if len(self._compiled) >= MOST_REMEMBERED:
                self._compiled.clear()
            self._compiled[kind] = compiled
        return compiled


def _kind_of_pointer(pointer: Tensor | TensorDescriptor | None) -> Any:
    """Return what Triton specialises a kernel for. The address and the shape of a descriptor are usual arguments."""
    if pointer is None:
        return None
    if isinstance(pointer, TensorDescriptor):
        return pointer.base.dtype, *pointer.block_shape
    return pointer.dtype, pointer.data_ptr() % 16 == 0


def unobserved(kernel: Any) -> bool:
    """Return whether no debugger or profiler watches the calls or changes the code that Triton compiles.

    Hooks on launches are called either way.
    """
    return isinstance(kernel, JITFunction) and not (
        kernel.pre_run_hooks
        or knobs.runtime.debug
        or knobs.compilation.instrumentation_mode
        or knobs.runtime.add_stages_inspection_hook
    )


cached_launch = functools.lru_cache(maxsize=256)(CachedLaunch)
"""Return the one `CachedLaunch` of a kernel with these constants."""
