"""Defects of a right output on the last rank, which an oracle must find."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

FIRST_SEED = int(os.environ.get("CAMPAIGN_SEED", "0"))
SEEDS = range(FIRST_SEED, FIRST_SEED + int(os.environ.get("CAMPAIGN_DEFECT_SEEDS", "3")))
"""Seeds of each problem. `scripts/campaign --defects N --seed FIRST` sets them."""
IS_CAMPAIGN = len(SEEDS) > 3
LARGE_SEEDS = SEEDS if torch.cuda.is_available() else SEEDS[::20]
"""Seeds of problems with real numbers of columns, which take long on CPUs."""


def _zero(*place: slice | int) -> Callable[[Tensor], Tensor]:
    return _times(0.0, *place)


def _times(factor: float, *place: slice | int) -> Callable[[Tensor], Tensor]:
    def defect(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad[place] = (grad[place].double() * factor).to(grad.dtype)
        return grad

    return defect


def _swapped(dim: int) -> Callable[[Tensor], Tensor]:
    """Return a defect that swaps the last two rows or columns."""

    def defect(grad: Tensor) -> Tensor:
        *order, last, before = range(grad.shape[dim])
        return grad[[*order, before, last]] if dim == 0 else grad[:, [*order, before, last]]

    return defect


ALL = slice(None)
DEFECTS: dict[str, Callable[[Tensor], Tensor]] = {
    "last column": _zero(ALL, -1),
    "last 64 columns": _zero(ALL, slice(-64, None)),
    "two columns swapped": _swapped(1),
    "two rows swapped": _swapped(0),
    "128 columns 3% too large": _times(1.03, ALL, slice(128, 256)),
    "one row": _zero(-1),
    "one row of another sign": _times(-1.0, -1),
    "one tile": _zero(slice(1, 65), slice(64, 128)),
    "the slice": _zero(ALL),
    "a scale of 1 + 2^-6": _times(1 + 2**-6, ALL),
}
"""Defects of a matrix of gradients, by name."""


def remember(oracle: Any, *methods: str) -> None:
    """Let methods of an oracle compute their results once for each block of rows: many outputs have the same inputs."""

    def remembered(function: Callable[..., Any]) -> Callable[..., Any]:
        results: dict[int, Any] = {}

        def run(rows: Any, *args: Any) -> Any:
            first = rows.start if isinstance(rows, slice) else 0
            if first not in results:
                results[first] = function(rows, *args)
            return results[first]

        return run

    for name in methods:
        setattr(oracle, name, remembered(getattr(oracle, name)))


def output_of_step(session: Any, changed_by: int | None) -> Any:
    """Return the output of one step of a session, maybe on inputs that change by a seed, so that runs are alike."""
    if changed_by is not None:
        session.audited_inputs.secret = changed_by
        session.audited_inputs.change()
    session.restore()
    session.step()
    return session.output
