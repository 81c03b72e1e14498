"""Random labels and matrices of the losses, by `hashing`: the same numbers at any world size and on any device."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.kernels import TopK
from tpbench.kernels.objective import Objective
from tpbench.measure.session import Context
from tpbench.workloads.hashing import fill_normal, hash_index, normal
from tpbench.workloads.losses import SEQUENCE, LossProblem
from tpbench.workloads.sizes import IGNORED, shard_bounds


@dataclass(frozen=True, kw_only=True)
class LossShard:
    """The place of one rank's part of a problem, and its target."""

    tokens: int
    vocab_start: int  # the first column of the logits that this rank holds
    vocab_stop: int  # the column after the last one
    vocab_size: int  # over all ranks
    group: dist.ProcessGroup | None  # the ranks that hold the vocabulary. None if one rank holds all of it
    tp_rank: int
    tp_size: int
    device: torch.device
    target: Any
    """Labels, (tokens,) int64 of the whole vocabulary, a `tpbench.kernels.TopK`, or target logits like the logits. For
    a linear loss, the teacher's hidden states and weight take the place of target logits."""
    rows: dict[str, Tensor] = field(default_factory=dict, metadata={"constant": True})
    """The tensors of rows of the policy loss by name, (tokens,) fp32: arguments of this project's functions."""

    @property
    def columns(self) -> int:
        return self.vocab_stop - self.vocab_start

    def reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Return the values of all ranks of the group, combined, maybe in place."""
        if self.group is not None:
            values = values.contiguous()
            dist.all_reduce(values, op, group=self.group)
        return values


def place(problem: LossProblem, context: Context) -> dict[str, Any]:
    """Return the fields of a `LossShard`."""
    start, stop = shard_bounds(problem.vocab, context.tp_size, context.tp_rank)
    sizes = {"tokens": problem.tokens, "vocab_start": start, "vocab_stop": stop, "vocab_size": problem.vocab}
    of_rank = {name: getattr(context, name) for name in ("tp_rank", "tp_size", "device")}
    return sizes | of_rank | {"group": context.tp_group if context.tp_size > 1 else None}


def given_target(problem: LossProblem, streams: tuple[int, int], rows: range, device: torch.device) -> Any:
    """Return labels, (rows,) int64, or a teacher's top k of some rows, or None for a loss against target logits.

    streams: of the labels, uniform over the vocabulary, and of the rows to ignore.
    """
    row = torch.arange(rows.start, rows.stop, dtype=torch.int64, device=device)
    if not problem.from_labels:
        return _teacher_top_k(problem, row) if problem.top_k else None
    label = (hash_index(problem.seed, streams[0], row) * problem.vocab) >> 32
    return torch.where(hash_index(problem.seed, streams[1], row) < round(problem.ignored * 2**32), IGNORED, label)


def _teacher_top_k(problem: LossProblem, row: Tensor) -> TopK:
    """Return a teacher's random logits in top_k columns of each row, one in each part of the vocabulary."""
    index = torch.arange(problem.top_k, device=row.device)
    row, column = hash_index(problem.seed, _TOP, row), hash_index(problem.seed, _TOP + 1, index)
    width = problem.vocab // problem.top_k
    return TopK(normal(row, column), (((row[:, None] ^ column) * width) >> 32) + index * width)


CLIP = (0.2, 0.2)
"""How far the ratio of the policy loss may fall below 1 and rise above it."""
_POLICY, _TOP = 120, 124
"""The first random streams of a policy's rows and sequences, and of a teacher's rows and columns."""


def policy_rows(problem: Any, logprob: Tensor) -> dict[str, Tensor]:
    """Return the tensors of rows of the policy loss, (tokens,) fp32, near the log-probabilities of the labels.

    The ratios' logarithms are -0.5, 0 and 0.5: the clip decides some of them, and no rounding of logits moves one over
    its limit. Where rounding may move them by more than an eighth, they are -1 and 1. Advantages are between 1 and 2,
    and the reference is 1 away, so that the terms of a gradient don't cancel for a kl_weight up to 0.3.
    """
    row, of_sequence = (
        hash_index(problem.seed, stream, torch.arange(count, device=logprob.device))
        for stream, count in ((_POLICY, len(logprob)), (_POLICY + 1, -(-len(logprob) // SEQUENCE)))
    )
    advantages = (1.0 + (of_sequence >> 1) % 5 / 4) * (of_sequence % 2 * 2 - 1)
    advantages = advantages.float().repeat_interleave(SEQUENCE)[: len(logprob)].contiguous()
    side, distance = row % 3 - 1, 0.5
    if problem.scale * torch.finfo(getattr(torch, problem.rounded_to)).eps > 2.0**-7:
        side, distance = torch.where(side == 0, advantages.sign().long(), side), 1.0  # 0: where no clip is near
    rows = {"old_logprobs": (logprob + side * distance).float(), "advantages": advantages}
    if problem.kl_weight or problem.objective:
        rows["ref_logprobs"] = (logprob + (row // 3 % 2 * 2 - 1)).float()
    if problem.objective:
        rows["mask"] = (row % 4 != 1).float()
    return rows


def objective_inputs(objective: Objective, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of rows that a user's own loss takes, by name."""
    return {name: rows[name] for name in (*objective.needed, *objective.optional) if name in rows}


def sequence_lengths(problem: Any) -> list[int]:
    """Return the rows of each sequence."""
    whole, rest = divmod(problem.tokens, SEQUENCE)
    return [SEQUENCE] * whole + [rest] * (rest > 0)


def kernel_options(problem: Any, shard: Any) -> dict[str, Any]:
    """Return the arguments that this project's kernels of both losses have."""
    options = {name: getattr(problem, name) for name in ("loss", "temperature", "exchange", "entropy")}
    options |= {name: getattr(shard, name) for name in ("group", "vocab_start", "vocab_size")}
    options["ignore_index"] = IGNORED
    if problem.objective:
        options |= {"loss": problem.objective, "sequence_lengths": sequence_lengths(problem)}
        options["row_inputs"] = objective_inputs(Objective.of(problem.objective), shard.rows)
    elif problem.loss == "policy":
        options |= {**shard.rows, "clip": CLIP, "kl_weight": problem.kl_weight}
        options["entropy_weight"] = problem.entropy_weight or 0.0
    return options


EDGE_LOGIT = 16.0
"""The scaled logit of a shard's first and last column in some rows of changed inputs: about half of the probability of
2^17 columns, and almost all of 2^10. Otherwise hardly any logit would depend on whether a softmax has that column."""


def edges(shard: LossShard, rows: int, which: int) -> list[tuple[int, int]]:
    """Return a row and a column of each edge of a shard, for its logits (which=0) or target logits (which=1)."""
    return [((2 * shard.tp_rank + at + which) % rows, column) for at, column in enumerate((0, shard.columns - 1))]


def normal_matrix(
    problem: Any, streams: tuple[int, int], rows: range, columns: range, device: torch.device, scale: float = 1.0
) -> Tensor:
    """Return the numbers of `normal` for these rows and columns, by their streams, times scale, a power of two."""
    out = torch.empty(len(rows), len(columns), dtype=getattr(torch, problem.dtype), device=device)
    fill_normal(out, problem.seed, streams[0], scale, (rows.start, columns.start), streams[1])
    return out
