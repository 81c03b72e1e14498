"""The problem's inputs, the same numbers at any world size and on any device.

Each number is an integer hash of (seed, stream, global row, global column), then an exact conversion, then one rounding
to the dtype (`tpbench.workloads.hashing`). So a rank makes its shard alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tpbench.workloads.hashing import hash_index, normal

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from tpbench.measure.session import Context
    from tpbench.workloads.entropy_loss import EntropyLoss

IGNORED = -100
"""The label of rows that do not count."""

_LOGITS, _TARGET_LOGITS, _LABELS, _IGNORED = range(1, 5)
"""Streams: independent numbers from one seed."""

_GPU_CHUNK, _CPU_CHUNK = 2**23, 2**18
"""Elements made at once. About five temporaries of 4 bytes an element: a GPU wants few launches (160 MiB), a CPU's
cache is small."""


@dataclass(frozen=True)
class Shard:
    """One rank's part of the problem."""

    logits: Tensor
    """(tokens, local vocab) in the problem's dtype."""
    target: Tensor
    """Labels, (tokens,) int64 of the whole vocabulary, or target logits like the logits."""
    vocab_start: int
    """The first column held here."""
    vocab_size: int
    """Columns over all ranks."""
    group: ProcessGroup | None
    """The ranks that hold the vocabulary; None if this one does alone."""
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
    """This rank's inputs. Data-parallel replicas take consecutive rows of one larger problem."""
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


def shard_bounds(vocab: int, tp_size: int, tp_rank: int) -> tuple[int, int]:
    """The columns [start, stop) of a rank: contiguous, and the first vocab % tp_size ranks hold one more."""
    share, more = divmod(vocab, tp_size)
    start = tp_rank * share + min(tp_rank, more)
    return start, start + share + (tp_rank < more)


def labels(problem: EntropyLoss, first_row: int, device: torch.device) -> Tensor:
    """(tokens,) int64: uniform over the vocabulary, and IGNORED for a share of `problem.ignored`, drawn by row."""
    row = torch.arange(first_row, first_row + problem.tokens, dtype=torch.int64, device=device)
    label = (hash_index(problem.seed, _LABELS, row) * problem.vocab) >> 32
    threshold = round(problem.ignored * 2**32)
    return torch.where(hash_index(problem.seed, _IGNORED, row) < threshold, IGNORED, label)


def _normal(problem: EntropyLoss, stream: int, first_row: int, start: int, stop: int, device: torch.device) -> Tensor:
    """Rows of about normal numbers, standard deviation 2.31, within +-8."""
    columns = stop - start
    out = torch.empty(problem.tokens, columns, dtype=getattr(torch, problem.dtype), device=device)
    row = torch.arange(first_row, first_row + problem.tokens, dtype=torch.int64, device=device)
    row_hash = hash_index(problem.seed, stream, row)
    column_hash = hash_index(problem.seed, stream + 16, torch.arange(start, stop, device=device))
    chunk = max(1, (_CPU_CHUNK if device.type == "cpu" else _GPU_CHUNK) // columns)
    for top in range(0, problem.tokens, chunk):
        out[top : top + chunk] = normal(row_hash[top : top + chunk], column_hash)
    return out
