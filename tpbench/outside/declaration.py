"""The decorator `tpbench.api.variant`, which declares a function of a user's file as a variant."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

REFUSAL = "_tpbench_unsupported_reason"
"""Attribute of a declared function: the argument `unsupported_reason`."""


def variant(
    summary: str = "",
    *,
    workload: str = "entropy_loss",
    options: Iterable[str] = (),
    requires: Iterable[str] = (),
    requires_cuda: bool = False,
    cpu_only_reason: str = "",
    no_graph_reason: str = "",
    uses_triton: bool | None = None,
    unsupported_reason: Callable[[Any, int], str | None] | None = None,
) -> Callable[[FunctionT], FunctionT]:
    """Declare the decorated function as a variant.

    The launcher reads the arguments from the text of the file. Hence all of them but `unsupported_reason` are literals.

    Args:
        summary: one line for `python -m tpbench list`. Empty: the first line of the function's docstring.
        workload: the workload whose operation the function implements.
        options: names of the workload's options that the function honours.
        requires: importable names of the packages without which the variant is skipped.
        requires_cuda: True if the variant is skipped on a CPU.
        cpu_only_reason: why the variant cannot run on GPUs. Empty if it can.
        no_graph_reason: why an iteration cannot be captured in a CUDA graph. Empty if it can.
        uses_triton: True if the kernels run in Triton's interpreter on a CPU. None: if the file imports triton.
        unsupported_reason: `(problem, tp_size) -> str | None`. It returns why the variant cannot run a problem. The
            ranks call it, and the cell is then skipped with that reason.
    """

    def declare(function: FunctionT) -> FunctionT:
        setattr(function, REFUSAL, unsupported_reason)
        return function

    return declare


def refusal(function: Callable[..., Any], problem: Any, tp_size: int) -> str | None:
    """Return why the function cannot run the problem on tp_size ranks, or None if it can."""
    reason: Callable[[Any, int], str | None] | None = getattr(function, REFUSAL, None)
    return None if reason is None else reason(problem, tp_size)
