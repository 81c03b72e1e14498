"""The float64 oracle of losses over a sharded vocabulary, in blocks of rows, and errors against it.

It computes the definitions (log-softmax, then the sum) in float64, on the same shards as the variants, with plain
all-reduces of one number per row. Blocks of rows bound its memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.comm.collectives import gather_objects
from tpbench.measure.session import Verdict
from tpbench.workloads.differences import Differences, malformed, place_of
from tpbench.workloads.losses.formulas import TWO_LOGIT_LOSSES


class VocabularyShard(Protocol):
    """The columns of one rank."""

    @property
    def vocab_start(self) -> int:
        """The first column that this rank holds."""

    @property
    def columns(self) -> int:
        """Number of columns that this rank holds."""

    @property
    def tp_size(self) -> int:
        """Number of ranks."""

    @property
    def group(self) -> Any:
        """The ranks' process group, or None if one rank holds all columns."""

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""


class LossOracle:
    """Losses and gradients of blocks of rows, from exact logits. Its methods are collective over the shard's group."""

    def __init__(self, problem: Any, shard: VocabularyShard, labels: Tensor | None, scale: float) -> None:
        """`labels`: (tokens,), or None for a loss against target logits. `scale`: factor on the logits."""
        self.problem, self.shard, self.labels, self.scale = problem, shard, labels, scale
        self.counts = torch.ones(problem.tokens, dtype=torch.bool, device=shard.device)
        if labels is not None:
            self.counts = (labels >= 0) & (labels < problem.vocab)
        self.inverse_count = 1.0 / max(1, int(self.counts.sum()))

    def blocks(self, elements: Mapping[str, int]) -> Iterator[slice]:
        """Yield slices of rows with about so many logits on a rank, by type of device. They are equal on all ranks."""
        columns = -(-self.problem.vocab // self.shard.tp_size)
        step = max(1, elements[self.shard.device.type] // columns)
        return (slice(first, min(first + step, self.problem.tokens)) for first in range(0, self.problem.tokens, step))

    def log_sum_exp(self, x: Tensor) -> Tensor:
        """Return log(sum(exp(x))) over the whole vocabulary, (rows,), from the local columns of some rows."""
        # The maximum of a NaN is undefined in a reduction. An infinity in its place becomes a NaN again below.
        highest = x.amax(-1).nan_to_num_(nan=math.inf, posinf=math.inf, neginf=-math.inf)
        highest = self.reduce(highest, dist.ReduceOp.MAX)
        return highest + self.sum((x - highest[:, None]).exp().sum(-1)).log()

    def row_losses(self, log_p: Tensor, log_q: Tensor | None, rows: slice) -> Tensor:
        """Return each row's loss, or log-probability for loss=logprob, 0 for a row that does not count.

        log_q: log-probabilities of the target logits, or None for losses from labels.
        """
        if log_q is not None:
            loss = TWO_LOGIT_LOSSES[self.problem.loss]
            weight = (log_p if loss.weight == "p" else log_q).exp()
            return self.sum(weighted(weight, loss.value(log_p, log_q)).sum(-1))
        label, held = self.local_label(rows)
        logprob = self.sum(torch.where(held, log_p.gather(1, label[:, None])[:, 0], 0.0))
        return logprob if self.problem.loss == "logprob" else -logprob

    def gradient_of_mean(self, log_p: Tensor, log_q: Tensor | None, row_loss: Tensor, rows: slice) -> Tensor:
        """Return the gradient of the mean loss by the unscaled local logits of some rows."""
        grad = log_p.exp()
        if log_q is None:
            label, held = self.local_label(rows)
            grad.scatter_add_(1, label[:, None], -held.double()[:, None])
        elif TWO_LOGIT_LOSSES[self.problem.loss].weight == "p":
            grad = weighted(grad, TWO_LOGIT_LOSSES[self.problem.loss].value(log_p, log_q) - row_loss[:, None])
        else:
            grad -= log_q.exp()
        return grad.mul_(self.scale * self.inverse_count).masked_fill_(~self.counts[rows, None], 0.0)

    def local_label(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return the labels' local columns, and a mask of the rows whose label this rank holds."""
        assert self.labels is not None
        label = self.labels[rows] - self.shard.vocab_start
        held = self.counts[rows] & (label >= 0) & (label < self.shard.columns)
        return label.where(held, torch.zeros_like(label)), held

    def identical(self, outputs: Iterable[tuple[Any, int]]) -> bool:
        """Return whether all ranks have the same bits in each output, of which each has so many numbers.

        Numbers of an output with another count are left out, so that all ranks can reduce as many.
        """
        bits = []
        for values, count in outputs:
            there = isinstance(values, Tensor) and values.numel() == count
            numbers = (
                values.reshape(-1).to(self.shard.device) if there else torch.zeros(count, device=self.shard.device)
            )
            bits += [
                torch.tensor([there], dtype=torch.int32, device=self.shard.device),
                numbers.float().view(torch.int32),
            ]
        lowest, highest = (self.reduce(torch.cat(bits), op) for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX))
        return torch.equal(lowest, highest)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks."""
        return self.reduce(values, dist.ReduceOp.SUM)

    def gather(self, value: Any) -> list[Any]:
        """Return one value of each rank, as JSON returns it."""
        return [value] if self.shard.group is None else gather_objects(value, self.shard.group)

    def reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        """Return the values of all ranks, combined."""
        if self.shard.group is not None:
            values = values.contiguous()
            dist.all_reduce(values, op, group=self.shard.group)
        return values


COLUMN = {
    "loss": "loss_error", "row_loss": "loss_error", "entropy": "entropy_error", "grad": "grad_error",
    "grad_hidden": "hidden_grad_error", "grad_weight": "weight_grad_error",
}  # fmt: skip
"""By name of an output, the column of its error."""


class Comparison:
    """Compares an iteration's outputs with the right ones. Collective over the oracle's ranks."""

    def __init__(
        self,
        oracle: LossOracle,
        limits: Mapping[str, float],
        outputs: Mapping[str, tuple[Any, tuple[int, ...], torch.dtype | None]],
    ) -> None:
        """`limits`: the largest error of a correct output, by column. `outputs`: each output with its right shape and,
        if only one is right, dtype."""
        self.oracle, self.limits = oracle, limits
        device = oracle.shard.device
        complaints = {name: malformed(name, *output, device) for name, output in outputs.items()}
        by_rank = oracle.gather({name: text for name, text in complaints.items() if text})
        self.malformed: dict[str, str] = {}
        for rank, texts in reversed(list(enumerate(by_rank))):
            self.malformed |= {name: f"rank {rank}: {text}" for name, text in texts.items()}
        wrong = {COLUMN[name] for name in self.malformed}
        self.errors = {
            column: torch.tensor(math.inf if column in wrong else 0.0, dtype=torch.float64, device=device)
            for column in limits
        }
        self.got = {name: value for name, (value, *_) in outputs.items() if name not in self.malformed}
        self.differences = {name: Differences() for name in outputs}

    def elements(self, name: str, right: Tensor) -> None:
        """Compare each element of an output, unless it is malformed on a rank."""
        if name in self.got:
            error = relative_error(self.got[name], right)
            self._record(name, error, self.got[name], right, lambda limit: ~(error <= limit))

    def rows(
        self, name: str, got: Tensor, right: Tensor, slack: float, first_row: int, *,
        whole_columns: int | None = None, least: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Compare rows of a gradient by norm: ||got - right|| / ||right||.

        A right element of zero must be zero. Errors of other elements below `slack` don't count.

        Args:
            whole_columns: The columns over all ranks, if each rank holds a part of every row.
            least: The least ||right||.
        """
        error = torch.where(right == 0, got.abs(), ((got - right).abs_() - slack).clamp_(min=0.0))
        squares = torch.stack((error.square().sum(-1), right.square().sum(-1)))
        error_norm, norm = (squares if whole_columns is None else self.oracle.sum(squares)).sqrt()
        norm = norm if least is None else norm.clamp(min=least)
        relative = torch.where(norm > 0, error_norm / norm, torch.where(error_norm == 0, 0.0, math.inf))
        relative = relative.nan_to_num(nan=math.inf, posinf=math.inf)
        share = norm[:, None] / math.sqrt(whole_columns or right.shape[1])
        # A row above the limit has an element above this one.
        self._record(
            name, relative, got, right,
            lambda limit: ~(relative <= limit)[:, None] & ~(error <= limit * share), first_row,
        )  # fmt: skip

    def _record(
        self, name: str, error: Tensor, got: Tensor, right: Tensor, differ: Callable[[float], Tensor],
        first_row: int = 0,
    ) -> None:  # fmt: skip
        column = COLUMN[name]
        if error.numel():
            self.errors[column] = torch.maximum(self.errors[column], error.max())
        self.differences[name].add(got, right, differ(self.limits[column]), first_row)

    def verdict(self, loss_value: float, loss_identical: bool) -> Verdict:
        """Return the errors of all ranks, and why the outputs are wrong. Equal on every rank."""
        worst = self.oracle.reduce(torch.stack(list(self.errors.values())), dist.ReduceOp.MAX)
        errors = dict(zip(self.errors, worst.tolist(), strict=True))
        wrong = [column for column, limit in self.limits.items() if not errors[column] <= limit]
        columns = {"loss_value": loss_value, **errors, "loss_identical": loss_identical}
        if not wrong:
            return Verdict(columns, None)
        by_rank = self.oracle.gather({name: vars(found) for name, found in self.differences.items() if found.count})
        places = dict(self.malformed)
        for rank, found in enumerate(by_rank):
            places |= {name: place_of(rank, name, **found[name]) for name in found.keys() - places.keys()}
        return Verdict(columns, " and ".join(self._reason(column, errors[column], places) for column in wrong))

    def _reason(self, column: str, error: float, places: Mapping[str, str]) -> str:
        """Return why a column's outputs are wrong. An output of a wrong shape has no error."""
        found = {name: text for name, text in places.items() if COLUMN[name] == column}
        if texts := [text for name, text in found.items() if name in self.malformed]:
            return "; ".join(texts)
        above = f"{column} {error:.3g} is above {self.limits[column]:.3g} ({self.oracle.problem.dtype})"
        return ": ".join([above, "; ".join(found.values())]) if found else above


def weighted(weight: Tensor, value: Tensor) -> Tensor:
    """Return weight * value, and 0 where the weight is 0, since 0 log 0 = 0."""
    return torch.where(weight == 0, 0.0, weight * value)


def relative_error(got: Tensor, right: Tensor) -> Tensor:
    """Return |got - right| / max(1, |right|) in float64: 0 for equal values, even infinite; inf for a NaN."""
    got, right = got.double(), right.double()
    error = (got - right).abs() / right.abs().clamp(min=1.0)
    return torch.where(got == right, 0.0, error.nan_to_num(nan=math.inf, posinf=math.inf))
