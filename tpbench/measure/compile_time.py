"""Time that a rank spends in compilers: of Triton's kernels, and of functions that go through torch.compile."""

import sys
from collections.abc import Sequence

from tpbench.measure.ranks import gather_numbers
from tpbench.measure.session import Context

_triton_us: list[float] = []
"""Microseconds of each kernel that this process compiled, or read from Triton's cache, since the first `listen`."""


def listen() -> None:
    """Count the kernels that Triton compiles from now on. Call it when the variant has imported its kernels."""
    knobs = getattr(sys.modules.get("triton"), "knobs", None)
    if knobs is not None:
        knobs.compilation.listener = lambda **compiled: _triton_us.append(compiled["times"].total)


def spent_s() -> list[float]:
    """Return the seconds in Triton's compiler and in torch.compile, with the kernels that it makes here, so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    of_torch = 0.0 if dynamo is None else dynamo.calculate_time_spent()["total_wall_time"]
    return [sum(_triton_us) / 1e6, float(of_torch)]


def compile_columns(before_s: Sequence[float], context: Context) -> dict[str, float]:
    """Return the columns of the slowest rank, since `spent_s` returned `before_s`. Collective."""
    here = [now - before for now, before in zip(spent_s(), before_s, strict=True)]
    triton, of_torch = (float(ranks.max()) for ranks in gather_numbers(here, context))
    return {"triton_compile_s": triton, "torch_compile_s": of_torch}
