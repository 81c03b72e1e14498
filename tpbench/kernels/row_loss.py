"""The loss of a row with its options, this rank's part of the vocabulary, and what kernels compute for some rows."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.kernels import LABEL_LOSSES
from tpbench.kernels.collectives import gather_by_rank

MOST_FP16_SCALE = 2**14
"""Largest scale of fp16 gradients: with it they stay in fp16's range even if one row of many counts."""


@dataclass(frozen=True)
class Vocabulary:
    """This rank's columns of the vocabulary."""

    start: int
    """The first global column of this rank."""
    size: int
    """Columns of the whole vocabulary, without padding."""
    columns: int
    """Columns of this rank, with padding."""
    widest: int | None
    """The most columns of a rank. None: unknown."""
    world_size: int
    rank: int

    @property
    def share(self) -> int:
        """Columns of each rank if the vocabulary is split evenly: equal on all ranks."""
        return -(-self.size // self.world_size)

    @property
    def valid(self) -> int:
        """Columns of this rank without padding."""
        return min(max(self.size - self.start, 0), self.columns)

    @classmethod
    def of_shard(
        cls, columns: int, device: torch.device, name: str, group: dist.ProcessGroup | None, start: int | None,
        size: int | None,
    ) -> Vocabulary:  # fmt: skip
        """Return this rank's columns. Collective, unless `start` and `size` are given or there is one rank.

        name: the argument that has the columns. Raises ValueError if the ranks' columns do not fit together.
        """
        world_size, rank = (1, 0) if group is None else (group.size(), group.rank())
        total, widest, first = columns, columns, 0
        if group is not None and world_size > 1:
            if start is not None and size is not None:
                return cls(start, size, columns, None, world_size, rank)
            # Not cached by local size: if it changed on some ranks only, those would gather alone.
            shard = torch.tensor([columns, -1 if start is None else start], device=device)
            sizes, given = gather_by_rank(shard, group, world_size).T.tolist()
            starts = [0, *itertools.accumulate(sizes)]
            wrong = [member for member, start in enumerate(given) if start not in (-1, starts[member])]
            if wrong:  # on all ranks alike
                raise ValueError(
                    "vocab_start must be where the columns of the ranks before end: "
                    + ", ".join(f"{starts[member]} on rank {member}, got {given[member]}" for member in wrong)
                )
            first, total, widest = starts[rank], starts[-1], max(sizes)
        elif start not in (None, 0):
            raise ValueError(f"vocab_start must be 0 or None without a group of ranks that hold the rest, got {start}")
        if total == 0:
            raise ValueError(f"{name} must have a column, here or on another rank of the group")
        if size is not None and size > total:
            raise ValueError(f"vocab_size must be at most the {total} columns held in all, got {size}")
        return cls(first, total if size is None else size, columns, widest, world_size, rank)


@dataclass(frozen=True)
class RowLoss:
    """The loss of a row, with the options of `entropy_loss` that are the same for all rows."""

    loss: str
    group: dist.ProcessGroup | None
    vocabulary: Vocabulary
    ignore_index: int
    logits_scale: float
    """Factor on logits. For logprob it contains the temperature."""
    temperature: float
    """Softens target logits only."""
    label_smoothing: float
    z_loss: float
    softcap: float
    """0: no cap."""
    target_softcap: float
    block_cap: int | Literal["auto"]
    exchange: str
    algorithm: str

    @property
    def has_labels(self) -> bool:
        return self.loss in LABEL_LOSSES

    @property
    def target_scale(self) -> float:
        """Factor on target logits."""
        return self.logits_scale / self.temperature

    @property
    def is_logprob(self) -> bool:
        """True if the kernels store the negative of `formula`."""
        return self.loss == "logprob"

    @property
    def formula(self) -> str:
        """The loss that the kernels compute: a log-probability is the negative cross-entropy."""
        return "cross_entropy" if self.is_logprob else self.loss

    @property
    def two_pass_algorithm(self) -> Literal["two_reads", "two_kernels"]:
        return "two_kernels" if self.algorithm == "two_kernels" or self.vocabulary.world_size > 1 else "two_reads"

    def grad_scale(self, scaling: Scaling) -> float:
        """Return the factor on the gradient of `formula` that the host knows."""
        scale = scaling.grad_scale * scaling.mean
        return -scale if self.is_logprob else scale


class Strides(NamedTuple):
    """Strides of the logits, target logits and gradient in elements, 0 for one that is missing. Kernels receive it.

    With ALIGNED, the one-pass kernels have the strides of rows in vectors.
    """

    logits_row: Any
    logits_column: Any
    target_row: Any
    target_column: Any
    grad_row: Any
    grad_column: Any


@dataclass(frozen=True)
class Outputs:
    """The tensors that the kernels fill for some rows. None: the caller does not want this one."""

    row_loss: Tensor
    """(rows,) fp32."""
    row_entropy: Tensor | None = None
    """(rows,) fp32."""
    grad: Tensor | None = None
    """(rows, local vocab). It may be the logits."""
    total: Tensor | None = None
    """fp32 scalar: the sum or the mean of the row losses."""
    accumulate: bool = False
    """Add to `grad` instead of overwriting it."""

    @classmethod
    def allocated(
        cls, rows: int, device: torch.device, entropy: bool, reduction: str, grad: Tensor | None = None,
        accumulate: bool = False,
    ) -> Outputs:  # fmt: skip
        """Allocate all but the gradient. With reduction="none" there is no total."""
        row_loss = torch.empty(rows, dtype=torch.float32, device=device)
        total = None if reduction == "none" else torch.empty((), dtype=torch.float32, device=device)
        return cls(row_loss, torch.empty_like(row_loss) if entropy else None, grad, total, accumulate)


@dataclass(frozen=True)
class Scaling:
    """The factors on the total and on the gradient."""

    mean: float = 1.0
    """Factor of the reduction on both, if the host knows it."""
    count: bool = False
    """Divide both by the number of rows that count, which the device counts."""
    inverse_count: Tensor | None = None
    """(1,) fp32: 1 / that number, if it was counted before, over other rows than these."""
    grad_scale: float = 1.0
    """Factor on the gradient alone."""
    row_grad: Tensor | None = None
    """(rows,) fp32: upstream gradient of each row's loss."""
    entropy_grad: Tensor | None = None
    """(rows,) fp32: upstream gradient of each row's entropy."""

    @classmethod
    def of_reduction(cls, reduction: str, loss: RowLoss, rows: int, **others: Any) -> Scaling:
        """Return the factors of "mean", "sum" or "none" over so many rows. `others`: the fields of the gradient."""
        is_mean = reduction == "mean" and rows > 0
        count = is_mean and loss.has_labels
        return cls(mean=1.0 / rows if is_mean and not count else 1.0, count=count, **others)


def fp16_gradient_scale(rows: int, *factors: float) -> float:
    """Return the power of two that an fp16 gradient of the mean over `rows` rows is multiplied by while it is stored.

    The division by the rows would round small gradients to zero (Micikevicius et al. 2018, arXiv:1710.03740, section
    3.2), so the scale is near the number of rows. It is smaller if other `factors` already increase the gradient.
    """
    room = min(rows, MOST_FP16_SCALE) / max(abs(math.prod(factors)), 1.0)
    return float(2 ** max(0, math.floor(math.log2(max(room, 1.0)))))
