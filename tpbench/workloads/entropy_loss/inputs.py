"""The problem's inputs, the same numbers at any world size and on any device.

Each number is an integer hash of (seed, stream, global row, global column), converted exactly and rounded once to the
dtype (`tpbench.workloads.hashing`). A rank makes its shard without communication.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tpbench.workloads.hashing import hash_index, normal
from tpbench.workloads.vocabulary import IGNORED, shard_bounds

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from tpbench.measure.session import Context
    from tpbench.workloads.entropy_loss.problem import EntropyLoss

_LOGITS, _TARGET_LOGITS, _LABELS, _IGNORED = range(1, 5)
"""Streams of independent numbers from one seed."""

_GPU_CHUNK, _CPU_CHUNK = 2**23, 2**18
"""Elements per chunk. A chunk needs about five temporaries of 4 bytes per element: 160 MiB on a GPU, for few launches.
A CPU's chunk fits into its cache."""


@dataclass(frozen=True)
class Shard:
    """One rank's part of the problem."""

    logits: Tensor
    """(tokens, local vocab) in the problem's dtype."""
    target: Tensor
    """Labels, (tokens,) int64 of the whole vocabulary, or target logits like the logits."""
    vocab_start: int
    """The first column that this rank holds."""
    vocab_size: int
    """Columns over all ranks."""
    group: ProcessGroup | None
    """The ranks that hold the vocabulary. None if one rank holds all of it."""
    tp_rank: int
    tp_size: int

    @property
    def tokens(self) -> int:
        return self.logits.shape[0]

    @property
    def vocab_stop(self) -> int:
        return self.vocab_start + self.logits.shape[1]

    @property
    def device(self) -> torch.device:
        return self.logits.device


def make_shard(problem: EntropyLoss, context: Context) -> Shard:
    """Return this rank's inputs. Data-parallel replicas take consecutive rows of one larger problem."""
    start, stop = shard_bounds(problem.vocab, context.tp_size, context.tp_rank)
    first = context.dp_rank * problem.tokens
    group = context.tp_group if context.tp_size > 1 else None
    shard: dict[str, Any] = {"vocab_start": start, "vocab_size": problem.vocab, "group": group}
    shard |= {"tp_rank": context.tp_rank, "tp_size": context.tp_size}
    if problem.from_labels:
        target = labels(problem, first, context.device)
    else:
        target = _normal(problem, _TARGET_LOGITS, first, start, stop, context.device)
    return Shard(_normal(problem, _LOGITS, first, start, stop, context.device), target, **shard)


def labels(problem: EntropyLoss, first_row: int, device: torch.device) -> Tensor:
    """Return labels (tokens,) int64, uniform over the vocabulary. A share `problem.ignored` of them is IGNORED."""
    row = torch.arange(first_row, first_row + problem.tokens, dtype=torch.int64, device=device)
    label = (hash_index(problem.seed, _LABELS, row) * problem.vocab) >> 32
    threshold = round(problem.ignored * 2**32)
    return torch.where(hash_index(problem.seed, _IGNORED, row) < threshold, IGNORED, label)


def _normal(problem: EntropyLoss, stream: int, first_row: int, start: int, stop: int, device: torch.device) -> Tensor:
    """Return rows of approximately normal numbers with standard deviation 2.31, within +-8."""
    columns = stop - start
    out = torch.empty(problem.tokens, columns, dtype=getattr(torch, problem.dtype), device=device)
    row = torch.arange(first_row, first_row + problem.tokens, dtype=torch.int64, device=device)
    row_hash = hash_index(problem.seed, stream, row)
    column_hash = hash_index(problem.seed, stream + 16, torch.arange(start, stop, device=device))
    chunk = max(1, (_CPU_CHUNK if device.type == "cpu" else _GPU_CHUNK) // columns)
    for top in range(0, problem.tokens, chunk):
        out[top : top + chunk] = normal(row_hash[top : top + chunk], column_hash)
    return out
