"""The loss of a row with its options, the tensors that kernels fill for some rows, and the factors on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from tpbench.kernels.losses import LABEL_LOSSES
from tpbench.kernels.vocabulary import Vocabulary


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
        if is_mean and loss.has_labels:
            return cls(count=True, **others)
        return cls(mean=1.0 / rows if is_mean else 1.0, **others)
