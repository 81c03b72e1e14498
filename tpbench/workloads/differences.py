"""Comparison of outputs with the right ones over all ranks: errors, and where the first wrong one differs."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpbench.measure.session import Verdict
from tpbench.workloads.hashing import CHUNK


class Compared(NamedTuple):
    """An output of a step, and what it must be."""

    value: Any
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """None: any."""
    column: str
    """The column of its error."""


class Comparison:
    """Compares outputs with the right ones, maybe in blocks of rows. Ranks compare alike, and the verdict is of all."""

    def __init__(
        self,
        outputs: Mapping[str, Compared],
        limits: Mapping[str, float],
        gather: Callable[[Any], list[Any]],
        device: torch.device,
        dtype: str,
    ) -> None:
        """`limits`: the largest error of a correct output, by column. `gather`: returns one value of each rank, as JSON
        returns it. `dtype`: that of the limits, for the reason."""
        self.limits, self.gather, self.dtype = limits, gather, dtype
        self.columns = {name: output.column for name, output in outputs.items()}
        self.places = self._of_first_rank(
            {name: _malformed(name, *output[:3], device) for name, output in outputs.items()}
        )
        """By name of an output, how the first rank's differs from the right one."""
        self.errors = {column: torch.zeros((), dtype=torch.float64, device=device) for column in limits}
        for name in self.places:
            self.errors[self.columns[name]].fill_(math.inf)
        self.got = {name: output.value for name, output in outputs.items() if name not in self.places}
        """The outputs that are of the right type on every rank."""
        self.counts = dict.fromkeys(outputs, (0, 0))
        """By output, how many elements of this rank differ, and how many it has."""
        self.first: dict[str, str] = {}
        """By output, where the first of them is, and how it differs."""

    def elements(self, name: str, error: Tensor, right: Tensor) -> None:
        """Record the error of each element of an output of `got`. Right: of the same shape."""
        self._record(name, error, self.got[name], right, lambda limit: ~(error <= limit), 0)

    def rows(
        self,
        name: str,
        got: Tensor,
        right: Tensor,
        slack: float,
        first_row: int,
        *,
        least: Tensor | None = None,
        lenience: float | None = None,
        whole_columns: int | None = None,
        over_ranks: Callable[[Tensor], Tensor] = lambda sums: sums,
    ) -> None:
        """Record the error of each row of a part of an output by norm: ||got - right|| / ||right||, in float64.

        A right element of zero must be zero. Errors of other elements below `slack` don't count.

        Args:
            least: The least ||right||.
            lenience: Compare each row also without its largest element, on each rank. The error may then be so many
                times larger than the limit of the output.
            whole_columns: The columns over all ranks, if each rank holds a part of every row.
            over_ranks: Returns the sum over these ranks.
        """
        error = torch.where(right == 0, got.abs(), ((got - right).abs_() - slack).clamp_(min=0.0))
        columns = whole_columns or right.shape[1]

        def by_norm(error: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
            """Return each row's error and the root mean square of its elements."""
            error_norm, norm = over_ranks(torch.stack((error.square().sum(-1), right.square().sum(-1)))).sqrt()
            norm = norm if least is None else norm.clamp(min=least)
            relative = torch.where(norm > 0, error_norm / norm, torch.where(error_norm == 0, 0.0, math.inf))
            return relative.nan_to_num(nan=math.inf, posinf=math.inf), norm[:, None] / math.sqrt(columns)

        relative, share = by_norm(error, right)
        if lenience is not None:
            largest = right.abs().topk(min(1, right.shape[1])).indices  # none on a rank without columns
            of_rest, share_of_rest = by_norm(*(matrix.scatter(-1, largest, 0.0) for matrix in (error, right)))
            relative, share = relative.maximum(of_rest / lenience), share.minimum(lenience * share_of_rest)

        def differ(limit: float) -> Tensor:
            # A row above the limit has an element above this one.
            above: Tensor = ~(relative <= limit)[:, None] & ~(error <= limit * share)
            return above

        self._record(name, relative, got, right, differ, first_row)

    def matrix(self, name: str, right: Tensor, slack: float) -> None:
        """Record the error of each row of an output of `got`, as `rows` does. A vector is one row.

        ||right|| counts as the root mean square of all rows at least. Smaller rows, such as those of sums that cancel,
        can be smaller than the rounding errors of what they are computed from.
        """
        got, right = (matrix.reshape(-1, matrix.shape[-1]) for matrix in (self.got[name], right))
        usual = right.norm(dim=-1).square().mean().sqrt()
        step = max(1, CHUNK[right.device.type] // right.shape[1])
        for first in range(0, len(right), step):
            part = slice(first, first + step)
            self.rows(name, got[part].double(), right[part], slack, first, least=usual)

    def _record(
        self, name: str, error: Tensor, got: Tensor, right: Tensor, differ: Callable[[float], Tensor], first_row: int
    ) -> None:
        column = self.columns[name]
        if error.numel():
            self.errors[column] = torch.maximum(self.errors[column], error.max())
        differs = differ(self.limits[column])
        count = int(differs.sum())
        if count and name not in self.first:
            at = tuple(differs.nonzero()[0].tolist())
            place = f", the first at {[at[0] + first_row, *at[1:]]}" if at else ""
            expected, wrong = float(right[at]), float(got[at])
            why = " (nan: memory that was never written)" if math.isnan(wrong) else ""
            why = " (the reference itself is nan)" if math.isnan(expected) else why
            self.first[name] = f"{place}: expected {expected:.6g}, got {wrong:.6g}{why}"
        self.counts[name] = self.counts[name][0] + count, self.counts[name][1] + differs.numel()

    def verdict(self) -> Verdict:
        """Return the largest errors of all ranks, and why the outputs are wrong. Equal on every rank."""
        by_rank = self.gather({column: float(error) for column, error in self.errors.items()})
        errors = {column: max(rank[column] for rank in by_rank) for column in self.limits}
        texts = {
            name: f"{count} of {total} elements of {name} differ{self.first[name]}"
            for name, (count, total) in self.counts.items()
            if count
        }
        places = {**self._of_first_rank(texts), **self.places}
        reasons = []
        for column, limit in self.limits.items():
            if not errors[column] <= limit:
                above = f"{column} {errors[column]:.3g} is above {limit:.3g} ({self.dtype})"
                malformed = [text for name, text in self.places.items() if self.columns[name] == column]
                where = [text for name, text in places.items() if self.columns[name] == column]
                reasons.append("; ".join(malformed) or ": ".join([above, *where]))
        return Verdict(errors, " and ".join(reasons) or None)

    def _of_first_rank(self, texts: Mapping[str, str]) -> dict[str, str]:
        """Return the text of the first rank that has one, by name."""
        places: dict[str, str] = {}
        for rank, of_rank in enumerate(self.gather({name: text for name, text in texts.items() if text})):
            places |= {name: f"rank {rank}: {text}" for name, text in of_rank.items() if name not in places}
        return places


def _malformed(name: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype | None, device: torch.device) -> str:
    """Return how an output differs in type, shape, dtype, layout or device from the right one. Empty: it doesn't.

    dtype: None for any real one.
    """

    def form(shape: Any, of: torch.dtype | None, device: torch.device, layout: Any = torch.strided) -> str:
        is_odd = of is not None and of.is_complex
        kinds = ([] if dtype is None and not is_odd else [of]) + ([] if layout == torch.strided else [layout])
        return f"{' '.join(map(str, (tuple(shape), *kinds)))} on {device.type}"

    expected = form(shape, dtype, device)
    got = "None" if value is None else f"of the type {type(value).__name__}"
    if isinstance(value, Tensor):
        got = form(value.shape, value.dtype, value.device, value.layout)
    return "" if got == expected else f"{name} is {got}, expected {expected}"
