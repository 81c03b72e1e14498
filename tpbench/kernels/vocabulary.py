"""The part of the vocabulary that a rank holds."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tpbench.kernels.collectives import gather_by_rank


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
        """Columns of this rank that are no padding."""
        return min(max(self.size - self.start, 0), self.columns)


def shard_of_vocabulary(
    columns: int, group: dist.ProcessGroup | None, vocab_start: int | None, vocab_size: int | None,
    device: torch.device, name: str = "logits",
) -> Vocabulary:  # fmt: skip
    """Return this rank's columns. Collective, unless vocab_start and vocab_size are given or there is one rank.

    name: the argument that has the columns, for errors. Raises ValueError if the ranks' columns do not fit together.
    """
    world_size, rank = (1, 0) if group is None else (group.size(), group.rank())
    if group is not None and world_size > 1:
        if vocab_start is not None and vocab_size is not None:
            return Vocabulary(vocab_start, vocab_size, columns, None, world_size, rank)
        # Not cached by local size: if it changed on some ranks only, those would gather alone.
        mine = torch.tensor([columns, -1 if vocab_start is None else vocab_start], device=device)
        sizes, given = gather_by_rank(mine, group, world_size).T.tolist()
        starts = [0, *itertools.accumulate(sizes)]
        if wrong := [each for each, told in enumerate(given) if told not in (-1, starts[each])]:  # on all ranks alike
            raise ValueError(
                "vocab_start must be where the columns of the ranks before end: "
                + ", ".join(f"{starts[each]} on rank {each}, got {given[each]}" for each in wrong)
            )
        start, total, widest = starts[rank], starts[-1], max(sizes)
    else:
        start, total, widest = 0, columns, columns
        if vocab_start not in (None, 0):
            raise ValueError(
                f"vocab_start must be 0 or None without a group of ranks that hold the rest, got {vocab_start}"
            )
    if total == 0:
        raise ValueError(f"{name} must have a column, here or on another rank of the group")
    if vocab_size is not None and vocab_size > total:
        raise ValueError(f"vocab_size must be at most the {total} columns held in all, got {vocab_size}")
    return Vocabulary(start, total if vocab_size is None else vocab_size, columns, widest, world_size, rank)
