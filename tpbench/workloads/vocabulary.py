"""A vocabulary that is sharded over tensor-parallel ranks: the columns of each rank, and the ignored label."""

from __future__ import annotations

IGNORED = -100
"""Label of a row that does not count, as in torch."""


def shard_bounds(vocab: int, tp_size: int, tp_rank: int) -> tuple[int, int]:
    """Return the columns [start, stop) of a rank. The first vocab % tp_size ranks hold one column more."""
    share, more = divmod(vocab, tp_size)
    start = tp_rank * share + min(tp_rank, more)
    return start, start + share + (tp_rank < more)
