"""Comparison of outputs with the right ones over all ranks: errors, and where the worst one differs.

An error that is a column of a row has one limit for each output: of elements, or of rows by norm, in which a wrong
element is lost. So an output is also judged by a bound for each element (`bounds`), and by sums over rows, columns or
ranks in which rounding errors average out (`groups`).
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpbench.measure.session import Verdict
from tpbench.workloads.hashing import CHUNK


class Compared(NamedTuple):
    """An output of a step, and what it must be."""

    value: Any
    shape: tuple[int, ...]
    dtype: torch.dtype | None  # None: any
    column: str  # of its error


class Finding(NamedTuple):
    """What is wrong with an output on one rank, by one way of judging it."""

    ratio: float  # of the largest error to the allowed one
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
        texts = {name: _malformed(name, *output[:3], device) for name, output in outputs.items()}
        self.malformed = _of_worst_rank(gather({name: Finding(math.inf, text) for name, text in texts.items() if text}))
        self.errors = {column: torch.zeros((), dtype=torch.float64, device=device) for column in limits}
        for name in self.malformed:
            self.errors[self.columns[name]].fill_(math.inf)
        self.got = {name: output.value for name, output in outputs.items() if name not in self.malformed}
        """The outputs that are of the right type on every rank."""
        self.counts: dict[tuple[str, str], tuple[int, int]] = {}
        """By output and way of judging it, this rank's elements with too large an error, and all that are judged."""
        self.worst: dict[tuple[str, str], Finding] = {}
        """By output and way of judging it, the largest error on this rank that is too large."""

    def elements(self, name: str, error: Tensor, right: Tensor) -> None:
        """Record the error of each element of an output of `got`. Right: of the same shape."""
        self._record(name, error, _ratio(error, self.limits[self.columns[name]]), self.got[name], right)

    def bounds(
        self, name: str, right: Tensor, allowed: Tensor, *, got: Tensor | None = None, first_row: int = 0
    ) -> None:
        """Judge each element of an output, or of its part `got` from `first_row` on: |got - right| <= allowed.

        allowed: a bound that follows from the arithmetic of correct outputs, such as `rounding`.
        """
        got = self.got[name] if got is None else got
        self._judge(name, "bound", _ratio((got.double() - right).abs_(), allowed), got, right, first_row)

    def groups(
        self, name: str, kind: str, errors: Tensor, allowed: Tensor | float, *, first: int = 0, what: str = "the error"
    ) -> None:
        """Judge rows, columns or other groups of an output's elements by the error of each, (groups,) or a scalar.

        kind, what: what a group and its error are, for the reason. allowed: the largest error that rounding explains.
        """
        errors = errors.abs()

        def text(at: int) -> str:
            most = float(torch.as_tensor(allowed, device=errors.device).expand_as(errors).flatten()[at])
            place = f"{kind} {at + first}" if errors.dim() else kind
            return f"{place} of {name} has {what} {float(errors.flatten()[at]):.3g}, above {most:.3g}"

        self._keep_worst(name, "group", _ratio(errors, allowed), text)

    def gains(self, name: str, kind: str, sums: Tensor, least: Tensor, limit: float, *, first: int = 0) -> None:
        """Judge how far the gains of groups, <got, right> / <right, right>, are from 1.

        sums: <got - right, right> and <right, right> of each group. least: of the latter.
        """
        squares = sums[1].maximum(least)
        gains = torch.where(squares == 0, 0.0, sums[0] / squares)
        self.groups(name, kind, gains, limit, first=first, what="the scale error")

    def rows(
        self,
        name: str,
        got: Tensor,
        right: Tensor,
        slack: float,
        first_row: int,
        *,
        least: Tensor | None = None,
        over_ranks: Callable[[Tensor], Tensor] = lambda sums: sums,
    ) -> None:
        """Record the error of each row of a part of an output by norm: ||got - right|| / ||right||, in float64.

        A right element of zero must be zero. Errors of other elements below `slack` don't count. least: of ||right||.
        over_ranks: returns the sum over the ranks that hold parts of the same rows.
        """
        error = torch.where(right == 0, got.abs(), ((got - right).abs_() - slack).clamp_(min=0.0))
        columns = right.new_full((len(right),), right.shape[1])
        sums = over_ranks(torch.stack((error.square().sum(-1), right.square().sum(-1), columns)))
        (error_norm, norm), columns = sums[:2].sqrt(), sums[2]
        norm = norm if least is None else norm.clamp(min=least)
        relative, limit = _ratio(error_norm, norm), self.limits[self.columns[name]]
        # A row above the limit has an element above this one.
        ratio = _ratio(error, (limit * norm / columns.sqrt())[:, None]).where((relative > limit)[:, None], 0.0)
        self._record(name, relative, ratio, got, right, first_row)

    def matrix(
        self, name: str, right: Tensor, slack: float, got: Tensor | None = None, least: Tensor | float = 0.0
    ) -> None:
        """Record the error of each row of an output, as `rows` does. A vector is one row.

        ||right|| counts as the root mean square of all rows at least, and as `least`, (rows,) or a scalar: sums that
        cancel can be smaller than rounding.
        """
        got = self.got[name] if got is None else got
        got, right = (matrix.reshape(-1, matrix.shape[-1]) for matrix in (got, right))
        usual = right.norm(dim=-1).square().mean().sqrt()
        least = torch.as_tensor(least, dtype=usual.dtype, device=usual.device).expand(len(right)).maximum(usual)
        step = max(1, CHUNK[right.device.type] // right.shape[1])
        for first in range(0, len(right), step):
            part = slice(first, first + step)
            self.rows(name, got[part].double(), right[part], slack, first, least=least[part])

    def _record(self, name: str, error: Tensor, ratio: Tensor, got: Tensor, right: Tensor, first_row: int = 0) -> None:
        column = self.columns[name]
        if error.numel():
            self.errors[column] = torch.maximum(self.errors[column], error.max())
        self._judge(name, "limit", ratio, got, right, first_row)

    def _judge(self, name: str, way: str, ratio: Tensor, got: Tensor, right: Tensor, first_row: int) -> None:
        count, of = self.counts.get((name, way), (0, 0))
        self.counts[name, way] = count + int((ratio > 1).sum()), of + ratio.numel()

        def text(index: int) -> str:
            at = tuple(int(position) for position in torch.unravel_index(torch.tensor(index), ratio.shape))
            place = f", most at {[at[0] + first_row, *at[1:]]}" if at else ""
            expected, wrong = float(right[at]), float(got[at])
            why = " (nan: computed, or memory that was never written)" if math.isnan(wrong) else ""
            why = " (the reference itself is nan)" if math.isnan(expected) else why
            return f"{place}: expected {expected:.6g}, got {wrong:.6g}{why}"

        self._keep_worst(name, way, ratio, text)

    def _keep_worst(self, name: str, way: str, ratio: Tensor, text: Callable[[int], str]) -> None:
        """Keep the largest ratio above 1. text: describes that of an index."""
        index = int(ratio.argmax()) if ratio.numel() else 0
        largest = float(ratio.flatten()[index]) if ratio.numel() else 0.0
        if largest > max(1.0, self.worst.get((name, way), Finding(0.0, "")).ratio):
            self.worst[name, way] = Finding(largest, text(index))

    def verdict(self) -> Verdict:
        """Return the largest errors of all ranks, and why the outputs are wrong. Equal on every rank."""
        findings = {}
        for (name, way), finding in self.worst.items():
            count, of = self.counts.get((name, way), (0, 0))
            what = "differ by more than rounding" if way == "bound" else "differ"
            text = f"{count} of {of} elements of {name} {what}{finding.text}" if of else finding.text
            findings[f"{name} {way}"] = finding._replace(text=text)
        of_rank = {column: float(error) for column, error in self.errors.items()}
        error_of, findings_of = zip(*self.gather((of_rank, findings)), strict=True)
        errors = {column: max(of_rank[column] for of_rank in error_of) for column in self.limits}
        places, reasons = _of_worst_rank(findings_of), []
        for column, limit in self.limits.items():
            names = [name for name, of_column in self.columns.items() if of_column == column]
            if malformed := [self.malformed[name] for name in names if name in self.malformed]:
                reasons.append("; ".join(malformed))
                continue
            is_above = not errors[column] <= limit
            ways = ("bound", "group", "limit")[: 3 if is_above else 2]
            found = [[places[f"{name} {way}"] for way in ways if f"{name} {way}" in places] for name in names]
            where = ": ".join(texts[0] for texts in found if texts)
            if is_above:
                where = f"{column} {errors[column]:.3g} is above {limit:.3g} ({self.dtype})" + (where and f": {where}")
            elif where:
                where += f" ({self.dtype})"
            reasons += [where] if where else []
        return Verdict(errors, " and ".join(reasons) or None)


def _of_worst_rank(by_rank: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the text of the rank with the largest error, and of these the first, by the keys of each rank's findings,
    pairs of a ratio and a text."""
    worst: dict[str, Finding] = {}
    for rank, findings in enumerate(by_rank):
        for key, (ratio, text) in findings.items():
            if key not in worst or ratio > worst[key].ratio:
                worst[key] = Finding(ratio, f"rank {rank}: {text}")
    return {key: finding.text for key, finding in worst.items()}


def rounding(right: Tensor, dtype: torch.dtype, *, times: int = 2) -> Tensor:
    """Return how far elements may be from the right ones after so many roundings to a dtype: each moves an element by
    half a unit in its last place, or by half the `smallest` number."""
    return right.abs().mul_(torch.finfo(dtype).eps / 2).clamp_(min=smallest(dtype) / 2).mul_(times)


def smallest(dtype: torch.dtype) -> float:
    """Return the smallest number of a dtype. Devices may flush those below the smallest normal one of fp32 to zero."""
    kind = torch.finfo(dtype)
    return max(kind.smallest_normal * kind.eps, torch.finfo(torch.float32).smallest_normal)


def _ratio(error: Tensor, allowed: Tensor | float) -> Tensor:
    """Return errors in units of the largest allowed ones: 0 for none, infinity for NaN."""
    return torch.where(error == 0, 0.0, (error.double() / allowed).nan_to_num_(nan=math.inf, posinf=math.inf))


def _malformed(name: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype | None, device: torch.device) -> str:
    """Return how an output differs in type, shape, dtype (None: any real one), layout or device from the right one."""

    def form(shape: Any, of: torch.dtype | None, device: torch.device, layout: Any = torch.strided) -> str:
        is_named = dtype is not None or (of is not None and of.is_complex)
        kinds = [f" {kind}" for kind, counts in ((of, is_named), (layout, layout != torch.strided)) if counts]
        return f"{tuple(shape)}{''.join(kinds)} on {device.type}"

    expected = form(shape, dtype, device)
    got = "None" if value is None else f"of the type {type(value).__name__}"
    if isinstance(value, Tensor):
        got = form(value.shape, value.dtype, value.device, value.layout)
    return "" if got == expected else f"{name} is {got}, expected {expected}"
