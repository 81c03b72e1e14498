"""Losses in torch operations that variants of both workloads use, and bytes that they send."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tpbench.comm.collectives import gather_rows
from tpbench.workloads.losses.two_logit_losses import TWO_LOGIT_LOSSES
from tpbench.workloads.ring_bytes import bytes_of_all_reduce
from tpbench.workloads.vocabulary import IGNORED, shard_bounds


def whole(local: Tensor, vocab: int, tp_size: int, group: Any) -> Tensor:
    """Return (tokens, vocab) from all ranks' columns. Backends gather equal sizes: a shorter shard is padded."""
    if group is None:
        return local.detach()
    bounds = [shard_bounds(vocab, tp_size, rank) for rank in range(tp_size)]
    widest = max(stop - start for start, stop in bounds)
    if local.shape[1] < widest:
        local = F.pad(local, (0, widest - local.shape[1]))
    parts = gather_rows(local, group).view(tp_size, len(local), widest)
    return torch.cat([part[:, : stop - start] for part, (start, stop) in zip(parts, bounds, strict=True)], dim=1)


def row_losses(loss: str, x: Tensor, target: Tensor) -> Tensor:
    """Return each row's loss, or log-probability for logprob, from logits and labels or target logits."""
    if loss in TWO_LOGIT_LOSSES:
        return TWO_LOGIT_LOSSES[loss].whole(x, target)
    row_loss = F.cross_entropy(x, target, ignore_index=IGNORED, reduction="none")
    return -row_loss if loss == "logprob" else row_loss


def rows_that_count(labels: Tensor) -> Tensor:
    """Return the number of rows whose label is not ignored, at least 1, as a tensor on the labels' device."""
    return (labels != IGNORED).sum().clamp(min=1)


def bytes_of_statistics(numbers: int, tokens: int, tp_size: int) -> int:
    """Return the bytes that a rank sends in all-reduces of `numbers` fp32 numbers for each row."""
    return bytes_of_all_reduce(numbers * 4 * tokens, tp_size)
