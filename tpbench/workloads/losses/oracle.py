"""The float64 oracle of losses over a sharded vocabulary, in blocks of rows: log-softmax, sums, plain all-reduces."""

import functools
import hashlib
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.comm.collectives import gather_objects
from tpbench.kernels import TopK
from tpbench.measure.session import Verdict
from tpbench.workloads.differences import Compared, Comparison
from tpbench.workloads.losses.formulas import JSD_BETA
from tpbench.workloads.losses.inputs import CLIP, policy_rows

Blocks = Iterator[tuple[slice, Tensor, tuple[Tensor, Tensor]]]
"""Some rows, and what `gradient_of_mean` returns for them."""


class LossOracle(ABC):
    """Losses and gradients of blocks of rows, from exact logits. Its methods are collective over the shard's group."""

    BLOCK: ClassVar[Mapping[str, int]]  # logits of a block of rows on a rank, by type of device

    def __init__(self, problem: Any, shard: Any) -> None:
        """`shard`: that of either loss. Only labels and a top k are read of its target."""
        self.problem, self.shard, self.scale = problem, shard, problem.scale
        self.sum: Callable[[Tensor], Tensor] = shard.reduce
        self.maximum: Callable[[Tensor], Tensor] = functools.partial(shard.reduce, op=dist.ReduceOp.MAX)
        # Rounded logits are wrong in proportion to their scale. Errors of fp32 have room for a scale of 4.
        self.steep: float = max(1.0, problem.largest_scale / (4 if problem.rounded_to == "float32" else 1))
        self.labels = labels = shard.target if problem.from_labels else None
        self.top = shard.target if isinstance(shard.target, TopK) else None
        self.counts = torch.ones(problem.tokens, dtype=torch.bool, device=shard.device)
        if labels is not None:
            self.counts = (labels >= 0) & (labels < problem.vocab)
        self.inverse_count = 1.0 / max(1, int(self.counts.sum()))
        self.signs: tuple[Tensor, Tensor] | None = None
        """For total variation p and log p - log q of the last block, whose sign rounding decides where it is small."""
        self.log_z: Tensor
        """(rows, 1): log(sum(exp(x))) of the last log-softmax."""

    @abstractmethod
    def logits(self, rows: slice) -> tuple[Tensor, Tensor | None]:
        """Return local logits of some rows, and target logits for a loss against these: unscaled, in float64."""

    @abstractmethod
    def limits(self) -> dict[str, float]:
        """Return the largest error of a correct row, by column."""

    @abstractmethod
    def gradients(self, output: Any) -> dict[str, Compared]:
        """Return the gradients of an output by name."""

    @abstractmethod
    def compare_gradients(self, comparison: Comparison, output: Any, blocks: Blocks) -> None:
        """Record the errors of gradients. `blocks` must be read whole."""

    def compare(self, output: Any) -> Verdict:
        """Return the errors of `output`, whose gradients must not be changed meanwhile."""
        problem, shape = self.problem, (self.problem.tokens,)
        outputs = {"loss": Compared(output.loss, (), None, "loss_error"), **self.gradients(output)}
        limits = self.limits()
        # Few variants return row_loss, so loss_error is of the mean alone. All ranks must compare the same outputs.
        if all(gather_objects(output.row_loss is not None)):
            outputs["row_loss"] = Compared(output.row_loss, shape, None, "row_loss_error")
            limits["row_loss_error"] = limits["loss_error"]
        if problem.entropy:
            outputs["entropy"] = Compared(output.entropy, shape, None, "entropy_error")
        comparison = Comparison(outputs, limits, gather_objects, self.shard.device, problem.dtype)
        row_loss = torch.zeros(shape, dtype=torch.float64, device=self.shard.device)
        entropy = torch.zeros_like(row_loss)

        def right_gradients() -> Blocks:
            for rows in self.blocks():
                log_p, log_q = self.log_probabilities(rows)
                row_loss[rows], slopes, shares = self.losses(log_p, log_q, rows)
                if problem.entropy:
                    entropy[rows] = self.entropies(log_p) * self.counts[rows]
                del log_p, log_q
                yield rows, *self.gradient_of_mean(slopes, shares, rows)

        blocks = right_gradients()
        if problem.trains:
            self.compare_gradients(comparison, output, blocks)
        deque(blocks)  # without gradients nothing else has read the rows
        right = {"loss": row_loss.sum() * self.inverse_count, "row_loss": row_loss}
        if problem.entropy:
            right["entropy"] = entropy
        for name in comparison.got.keys() & right.keys():
            comparison.elements(name, relative_error(comparison.got[name], right[name]), right[name])
        verdict = comparison.verdict()
        bits = hashlib.sha256()
        for values in (getattr(output, name) for name in right):
            bits.update(values.detach().float().cpu().numpy().tobytes() if isinstance(values, Tensor) else b"no tensor")
        identical = len(set(gather_objects(bits.hexdigest()))) == 1
        verdict.columns.update(loss_value=float(right["loss"]), loss_identical=identical)
        if errors := [error for column, error in verdict.columns.items() if column.endswith("_grad_error")]:
            verdict.columns["grad_error"] = max(errors)
        return verdict

    def log_probabilities(self, rows: slice) -> tuple[Tensor, Tensor | None]:
        """Return log p of the local logits of some rows and, for a loss against target logits, log q."""
        logits, target = self.logits(rows)
        log_q = None if target is None else self.log_softmax(target * self.problem.target_scale)
        if self.problem.softcap:
            logits = self.problem.softcap * (logits / self.problem.softcap).tanh()
        return self.log_softmax(logits * self.scale), log_q

    @functools.cached_property
    def row_loss(self) -> Tensor:
        return torch.cat([self.losses(*self.log_probabilities(rows), rows)[0] for rows in self.blocks()])

    def blocks(self) -> Iterator[slice]:
        """Yield slices of rows, which are equal on all ranks."""
        columns = -(-self.problem.vocab // self.shard.tp_size)
        step = max(1, self.BLOCK[self.shard.device.type] // columns)
        return (slice(first, min(first + step, self.problem.tokens)) for first in range(0, self.problem.tokens, step))

    def log_softmax(self, x: Tensor) -> Tensor:
        """Return log(softmax(x)) over the whole vocabulary, (rows, local columns), of some rows' local columns."""
        # The maximum of a NaN is undefined in a reduction. An infinity in its place becomes a NaN again below.
        highest = x.amax(-1).nan_to_num_(nan=math.inf, posinf=math.inf, neginf=-math.inf)
        highest = self.maximum(highest)[:, None]
        log_sum = self.sum((x - highest).exp().sum(-1)).log()[:, None]
        self.log_z = highest + log_sum
        return x - highest - log_sum

    def losses(self, log_p: Tensor, log_q: Tensor | None, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return each row's loss, or its log-probability, and two terms, (rows, local columns).

        The first term has derivatives by each column's log p, the second their sum over all columns times p: the
        gradient by scaled logits is their difference. log_q: log-probabilities of the target logits, if there are any.
        """
        if self.top is not None:
            return self._of_top_k(self.top, log_p, rows)
        if log_q is not None:
            return self._of_target_logits(log_p, log_q)
        assert self.labels is not None
        label = self.labels[rows] - self.shard.vocab_start
        held = self.counts[rows] & (label >= 0) & (label < self.shard.columns)
        column = label.where(held, torch.zeros_like(label))[:, None]
        logprob = self.sum(torch.where(held, log_p.gather(1, column)[:, 0], 0.0))
        loss, slope = -logprob, -torch.ones_like(logprob)
        if self.problem.loss == "policy":
            loss, slope = self._policy(logprob, rows)
        elif self.problem.loss == "logprob":
            loss, slope = logprob, -slope
        slopes = torch.zeros_like(log_p).scatter_add_(1, column, (slope * held)[:, None])
        if smoothing := self.problem.label_smoothing:
            loss = (1 - smoothing) * loss - smoothing / self.problem.vocab * self.sum(log_p.sum(-1))
            slopes = (1 - smoothing) * slopes - smoothing / self.problem.vocab
        if z_loss := self.problem.z_loss:
            loss, slope = loss + z_loss * self.log_z[:, 0].square(), slope - 2 * z_loss * self.log_z[:, 0]
        if weight := self.problem.entropy_weight:
            bonus = weight * self.entropies(log_p)
            loss, slope = loss - bonus, slope - bonus
            slopes += weight * weighted(log_p.exp(), log_p)
        return loss.where(self.counts[rows], 0.0), slopes, slope[:, None] * log_p.exp()

    def _of_target_logits(self, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        p, q = log_p.exp(), log_q.exp()
        if self.problem.loss == "total_variation":
            slopes = p * (p - q).sign() / 2
            self.signs = p, log_p - log_q
            return self.sum((p - q).abs().sum(-1)) / 2, slopes, self.sum(slopes.sum(-1))[:, None] * p
        if self.problem.loss == "jsd":
            log_mixture = torch.logaddexp(log_q + math.log(JSD_BETA), log_p + math.log1p(-JSD_BETA))
            slopes = (1 - JSD_BETA) * weighted(p, log_p - log_mixture)
            of_p = self.sum(slopes.sum(-1))
            return of_p + self.sum(JSD_BETA * weighted(q, log_q - log_mixture).sum(-1)), slopes, of_p[:, None] * p
        if self.problem.loss == "reverse_kl":
            slopes = weighted(p, log_p - log_q)
            loss = self.sum(slopes.sum(-1))
            return loss, slopes, loss[:, None] * p
        values = -log_p if self.problem.loss == "soft_cross_entropy" else log_q - log_p
        return self.sum(weighted(q, values).sum(-1)), -q, -p

    def _of_top_k(self, top: TopK, log_p: Tensor, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        log_q = (top.values[rows].double() * self.problem.target_scale).log_softmax(-1)
        local = top.indices[rows] - self.shard.vocab_start
        held = (local >= 0) & (local < self.shard.columns)
        column = local.where(held, torch.zeros_like(local))

        def scattered(values: Tensor) -> Tensor:
            return torch.zeros_like(log_p).scatter_add_(1, column, values.where(held, 0.0))

        log_top = self.maximum(torch.where(held, log_p.gather(1, column), -math.inf))
        if self.problem.loss == "reverse_kl":  # of the distributions over the k columns
            log_top = log_top.log_softmax(-1)
            slopes = weighted(log_top.exp(), log_top - log_q)
            loss = slopes.sum(-1)
            return loss, scattered(slopes), scattered(loss[:, None] * log_top.exp())
        loss = weighted(log_q.exp(), (log_q if self.problem.loss == "forward_kl" else 0.0) - log_top).sum(-1)
        return loss, scattered(-log_q.exp()), -log_p.exp()

    def _policy(self, logprob: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Return each row's policy loss and its derivative by the label's log-probability."""
        given = {name: values[rows].double() for name, values in self.shard.rows.items()}
        ratio, advantages = (logprob - given["old_logprobs"]).exp(), given["advantages"]
        is_clipped = torch.where(advantages > 0, ratio > 1 + CLIP[1], ratio < 1 - CLIP[0]) & (advantages != 0)
        bound = ratio.clamp(1 - CLIP[0], 1 + CLIP[1])
        loss = -torch.where(is_clipped, bound, ratio) * advantages
        slope = -(ratio * advantages).masked_fill(is_clipped, 0.0)
        if self.problem.kl_weight:
            difference = given["ref_logprobs"] - logprob
            loss += self.problem.kl_weight * (difference.expm1() - difference)
            slope -= self.problem.kl_weight * difference.expm1()
        return loss.where(self.counts[rows], 0.0), slope

    def entropies(self, log_p: Tensor) -> Tensor:
        return self.sum(-weighted(log_p.exp(), log_p).sum(-1))

    def gradient_of_mean(self, slopes: Tensor, shares: Tensor, rows: slice) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the gradient of the mean loss by the unscaled local logits of some rows, and its absolute terms, which
        are much more than the gradient where the terms of `losses` cancel."""
        factor, absent = self.scale * self.inverse_count, ~self.counts[rows][:, None]

        def scaled(values: Tensor) -> Tensor:
            return values.mul_(factor).masked_fill_(absent, 0.0)

        gradient, terms = scaled(slopes - shares), (scaled(slopes.abs()), scaled(shares.abs()))
        if softcap := self.problem.softcap:  # rounding of its slope is relative to 1, as the terms are
            gradient *= 1 - (self.logits(rows)[0] / softcap).tanh().square()
        return gradient, terms


def set_policy_rows(problem: Any, shard: Any, oracle: type[LossOracle]) -> None:
    """Write the rows of a policy loss, near the log-probabilities of the labels of these logits. Collective."""
    if problem.is_policy:
        plain = {"objective": None} if problem.objective else {}
        logprob = -oracle(replace(problem, loss="cross_entropy", **plain), shard).row_loss
        for name, values in policy_rows(problem, logprob).items():
            shard.rows.setdefault(name, values).data.copy_(values)


def weighted(weight: Tensor, value: Tensor) -> Tensor:
    """Return weight * value, and 0 where the weight is 0, since 0 log 0 = 0."""
    return torch.where(weight == 0, 0.0, weight * value)


def relative_error(got: Tensor, right: Tensor) -> Tensor:
    """Return |got - right| / max(1, |right|) in float64: 0 for equal values, even infinite; inf for a NaN."""
    got, right = got.double(), right.double()
    error = (got - right).abs() / right.abs().clamp(min=1.0)
    return torch.where(got == right, 0.0, error.nan_to_num(nan=math.inf, posinf=math.inf))
