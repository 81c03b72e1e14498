"""Kernel launches that cost the host little: see `Launch`."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from triton import JITFunction, knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver

MOST_REMEMBERED = 256
"""Kinds of arguments, by launch. It is memory that this bounds: rows may differ from call to call."""


class Launch:
    """`kernel[(programs,)](*arguments, **constants)`, at a fraction of its host time from the second call of a kind on.

    Each time Triton looks at every argument for what the kernel may be compiled by: dtypes and whether addresses are
    multiples of 16, integers, constants, options. But what it compiled it also launches by itself
    (`compiled[grid](*arguments)`, as in Triton's tutorial on fused softmax), which is right for arguments of the same
    kind. Two calls are of one kind here where they have equal integers and pointers of the same dtype and alignment, on
    the same device: more than Triton asks for. It compiles nothing by the value of a float. Constants, of which some
    are launch options, are one `Launch`'s own.

    The kernel's parameters must come as `__call__` has them, then its constants.
    """

    def __init__(self, kernel: Any, **constants: Any) -> None:
        self.kernel = kernel
        self.constants = constants
        # A compiled kernel takes its constants too, in their places, and makes nothing of them.
        self._in_place = tuple(constants[name] for name in kernel.arg_names if name in constants)
        self._compiled: dict[Any, CompiledKernel] = {}

    def __call__(
        self, programs: int, pointers: tuple[Tensor | None, ...], integers: tuple[int, ...],
        floats: tuple[float, ...] = (), more_integers: tuple[int, ...] = (),
    ) -> Any:  # fmt: skip
        """Queue the kernel on the current stream of the current device. Returns what Triton compiled, None in its
        interpreter."""
        # An integer among the floats would be compiled as one.
        arguments = (*pointers, *integers, *map(float, floats), *more_integers)
        if not _as_usual(self.kernel):
            return self.kernel[(programs,)](*arguments, **self.constants)
        alike = tuple([None if each is None else (each.dtype, each.data_ptr() % 16 == 0) for each in pointers])
        kind = (driver.active.get_current_device(), alike, integers, more_integers)
        compiled = self._compiled.get(kind)
        if compiled is not None:
            compiled[programs, 1, 1](*arguments, *self._in_place)
            return compiled
        compiled = self.kernel[(programs,)](*arguments, **self.constants)
        if isinstance(compiled, CompiledKernel):  # it may also be one to come, of a compilation under way
            if len(self._compiled) >= MOST_REMEMBERED:
                self._compiled.clear()
            self._compiled[kind] = compiled
        return compiled


def _as_usual(kernel: Any) -> bool:
    """Whether nobody watches or changes what Triton makes of calls: debuggers and profilers that put instructions into
    kernels. Hooks on launches are called either way."""
    return isinstance(kernel, JITFunction) and not (
        kernel.pre_run_hooks
        or knobs.runtime.debug
        or knobs.compilation.instrumentation_mode
        or knobs.runtime.add_stages_inspection_hook
    )


launch_of = functools.lru_cache(maxsize=256)(Launch)
"""The `Launch` of a kernel with these constants: one, which remembers."""
