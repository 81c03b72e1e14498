"""Comparison of outputs with the right ones over all ranks: errors, and where the worst one differs.

An error that is a column of a row has one limit for each output: of elements, or of rows by norm. In a row's norm a
wrong element is lost among many others. So an output is also judged by what has no column: by a bound for each element
(`bounds`), and by sums over rows, columns or ranks in which rounding errors average out (`groups`).
"""

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


class Finding(NamedTuple):
    """What is wrong with an output on one rank, by one way of judging it."""

    ratio: float
    """The largest error, in units of the largest allowed one."""
    text: str


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
        malformed = {name: _malformed(name, *output[:3], device) for name, output in outputs.items()}
        self.malformed = self._of_worst_rank(
            {name: Finding(math.inf, text) for name, text in malformed.items() if text}
        )
        """By name of an output, how the first rank's differs from the right one."""
        self.errors = {column: torch.zeros((), dtype=torch.float64, device=device) for column in limits}
        for name in self.malformed:
            self.errors[self.columns[name]].fill_(math.inf)
        self.got = {name: output.value for name, output in outputs.items() if name not in self.malformed}
        """The outputs that are of the right type on every rank."""
        self.counts: dict[str, tuple[int, int]] = {}
        """By output, how many elements of this rank differ by more than its error may be, and how many it has."""
        self.outside: dict[str, tuple[int, int]] = {}
        """By output, how many elements of this rank are outside their bounds, and how many have one."""
        self.worst: dict[str, Finding] = {}
        """By output, the element that differs most from the right one for its limit."""
        self.most_outside: dict[str, Finding] = {}
        """By output, the element that is furthest outside its bound."""
        self.worst_groups: dict[str, Finding] = {}
        """By output, the row, column or other group with the largest error for its limit."""
        self.ratios: dict[str, float] = {}
        """By output and way of judging it, the largest error on this rank in units of the allowed one."""

    def elements(self, name: str, error: Tensor, right: Tensor) -> None:
        """Record the error of each element of an output of `got`. Right: of the same shape."""
        self._record(name, error, self.got[name], right, lambda limit: _ratio(error, limit), 0)

    def bounds(
        self, name: str, right: Tensor, allowed: Tensor, *, got: Tensor | None = None, first_row: int = 0
    ) -> None:
        """Judge each element of an output, or of its rows from `first_row` on: |got - right| <= allowed.

        allowed: a bound that follows from the arithmetic of correct outputs (`rounding` and what else they may err by).
        got: that part of the output in float64, if it isn't the whole one.
        """
        got = self.got[name] if got is None else got
        ratio = _ratio((got.double() - right).abs_(), allowed)
        count, of = self.outside.get(name, (0, 0))
        self.outside[name] = count + int((ratio > 1).sum()), of + ratio.numel()
        self._keep_worst(self.most_outside, name, "element", ratio, got, right, first_row)

    def groups(
        self, name: str, kind: str, errors: Tensor, allowed: Tensor | float, *, first: int = 0, what: str = "the error"
    ) -> None:
        """Judge rows, columns or other groups of an output's elements by one number for each.

        Args:
            kind: What a group is, for the reason, such as "row".
            errors: The error of each group, (groups,), or a scalar if there is one.
            allowed: The largest that rounding explains.
            first: The index of the first group.
            what: What the number is, for the reason.
        """
        errors = errors.abs()
        ratio = _ratio(errors, allowed)
        if not ratio.numel():
            return
        at = int(ratio.argmax())
        largest = float(ratio.flatten()[at])
        key = f"{name} {kind} {what}"
        self.ratios[key] = max(self.ratios.get(key, 0.0), largest)
        if largest > 1 and largest > self.worst_groups.get(name, Finding(0.0, "")).ratio:
            most = float(torch.as_tensor(allowed, device=errors.device).expand_as(errors).flatten()[at])
            place = f"{kind} {at + first}" if errors.dim() else kind
            error = float(errors.flatten()[at])
            self.worst_groups[name] = Finding(largest, f"{place} of {name} has {what} {error:.3g}, above {most:.3g}")

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

        def ratio(limit: float) -> Tensor:
            # A row above the limit has an element above this one.
            return _ratio(error, limit * share).where(~(relative <= limit)[:, None], 0.0)

        self._record(name, relative, got, right, ratio, first_row)

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
        self,
        name: str,
        error: Tensor,
        got: Tensor,
        right: Tensor,
        ratio_above: Callable[[float], Tensor],
        first_row: int,
    ) -> None:
        """Record the errors of a column. ratio_above: returns each element's error in units of what a limit allows."""
        column = self.columns[name]
        if error.numel():
            self.errors[column] = torch.maximum(self.errors[column], error.max())
        ratio = ratio_above(self.limits[column])
        count, of = self.counts.get(name, (0, 0))
        self.counts[name] = count + int((ratio > 1).sum()), of + ratio.numel()
        self._keep_worst(self.worst, name, column, ratio, got, right, first_row)

    def _keep_worst(
        self,
        findings: dict[str, Finding],
        name: str,
        kind: str,
        ratio: Tensor,
        got: Tensor,
        right: Tensor,
        first_row: int,
    ) -> None:
        if not ratio.numel():
            return
        index = int(ratio.argmax())
        largest = float(ratio.flatten()[index])
        key = f"{name} {kind}"
        self.ratios[key] = max(self.ratios.get(key, 0.0), largest)
        if largest <= 1 or largest <= findings.get(name, Finding(0.0, "")).ratio:
            return
        at = tuple(int(position) for position in torch.unravel_index(torch.tensor(index), ratio.shape))
        place = f", most at {[at[0] + first_row, *at[1:]]}" if at else ""
        expected, wrong = float(right[at]), float(got[at])
        why = " (nan: computed, or memory that was never written)" if math.isnan(wrong) else ""
        why = " (the reference itself is nan)" if math.isnan(expected) else why
        findings[name] = Finding(largest, f"{place}: expected {expected:.6g}, got {wrong:.6g}{why}")

    def verdict(self) -> Verdict:
        """Return the largest errors of all ranks, and why the outputs are wrong. Equal on every rank."""
        by_rank = self.gather({column: float(error) for column, error in self.errors.items()})
        errors = {column: max(rank[column] for rank in by_rank) for column in self.limits}

        def places(findings: dict[str, Finding], counts: dict[str, tuple[int, int]], verb: str) -> dict[str, str]:
            texts = {}
            for name, finding in findings.items():
                count, of = counts[name]
                text = f"{count} of {of} elements of {name} {verb}{finding.text}"
                texts[name] = finding._replace(text=text)
            return self._of_worst_rank(texts)

        differing = {**places(self.worst, self.counts, "differ"), **self.malformed}
        outside = places(self.most_outside, self.outside, "differ by more than rounding")
        groups = self._of_worst_rank(self.worst_groups)
        reasons = []
        for column, limit in self.limits.items():
            names = [name for name, of in self.columns.items() if of == column]
            malformed = [self.malformed[name] for name in names if name in self.malformed]
            found: dict[str, str] = differing if not errors[column] <= limit else {}
            where = [(found | groups | outside)[name] for name in names if name in found | groups | outside]
            if malformed:
                reasons.append("; ".join(malformed))
            elif not errors[column] <= limit:
                reasons.append(
                    ": ".join([f"{column} {errors[column]:.3g} is above {limit:.3g} ({self.dtype})", *where])
                )
            elif where:
                reasons.append(f"{': '.join(where)} ({self.dtype})")
        return Verdict(errors, " and ".join(reasons) or None)

    def _of_worst_rank(self, findings: Mapping[str, Finding]) -> dict[str, str]:
        """Return the text of the rank with the largest error, and of these the first, by name of an output."""
        worst: dict[str, Finding] = {}
        for rank, of_rank in enumerate(self.gather({name: [*finding] for name, finding in findings.items()})):
            for name, (ratio, text) in of_rank.items():
                if name not in worst or ratio > worst[name].ratio:
                    worst[name] = Finding(ratio, f"rank {rank}: {text}")
        return {name: finding.text for name, finding in worst.items()}


def rounding(right: Tensor, dtype: torch.dtype, *, times: int = 2) -> Tensor:
    """Return how far elements may be from the right ones after so many roundings to a dtype.

    It is half a unit in the last place, relative to the element, or half the dtype's smallest number for each. Devices
    may flush numbers below the smallest normal one of fp32 to zero.
    """
    kind = torch.finfo(dtype)
    least = max(kind.smallest_normal * kind.eps / 2, torch.finfo(torch.float32).smallest_normal / 2)
    return right.abs().mul_(kind.eps / 2).clamp_(min=least).mul_(times)


def _ratio(error: Tensor, allowed: Tensor | float) -> Tensor:
    """Return errors in units of the largest allowed ones: 0 for none, infinity for NaN."""
    return torch.where(error == 0, 0.0, (error.double() / allowed).nan_to_num_(nan=math.inf, posinf=math.inf))


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
