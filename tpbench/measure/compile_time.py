"""Time that a rank spends in compilers: of Triton's kernels, and of functions that go through torch.compile."""

from __future__ import annotations

import sys
from typing import Any

from tpbench.measure.ranks import gather_numbers
from tpbench.measure.session import Context

_triton_us: list[float] = []
"""Microseconds of each kernel that this process compiled, or read from Triton's cache, since the first `listen`."""


def listen() -> None:
    """Count the kernels that Triton compiles from now on. Call it when the variant has imported its kernels."""
    knobs = getattr(sys.modules.get("triton"), "knobs", None)
    if knobs is None or getattr(knobs.compilation.listener, "of_tpbench", False):
        return
    before = knobs.compilation.listener

    def listener(**compiled: Any) -> None:
        _triton_us.append(compiled["times"].total)
        if before is not None:
            before(**compiled)

    listener.of_tpbench = True  # type: ignore[attr-defined]
    knobs.compilation.listener = listener


class CompileTime:
    """Compile times of one cell: those since this object was made."""

    def __init__(self) -> None:
        self.before = _spent_s()

    def columns(self, context: Context) -> dict[str, float]:
        """Return the columns of the slowest rank. Collective."""
        here = [now - before for now, before in zip(_spent_s(), self.before, strict=True)]
        names = "triton_compile_s", "torch_compile_s"
        return {name: float(ranks.max()) for name, ranks in zip(names, gather_numbers(here, context), strict=True)}


def _spent_s() -> tuple[float, float]:
    """Return the seconds in Triton's compiler and in torch.compile so far. The latter contain the kernels that it makes
    in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    of_torch = 0.0 if dynamo is None else dynamo.calculate_time_spent()["total_wall_time"]
    return sum(_triton_us) / 1e6, float(of_torch)
