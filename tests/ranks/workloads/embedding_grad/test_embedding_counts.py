"""Counts of rows through shared memory: the same as through a collective, and no file left behind."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tpbench.comm import shared_memory_all_gather as module
from tpbench.workloads.embedding_grad.traffic.collectives import CountedCollectives

needs_ranks = pytest.mark.skipif(not enough_gpus(4), reason="needs 4 GPUs, or none")


def counted(here: Rank, folder: str, full: bool = False) -> tuple[bool, list[list[int]], list[int], list[int]]:
    """Return if there is shared memory, the last counts of two exchanges after many, and the sent bytes."""
    comm = CountedCollectives(here.group, here.rank, here.world_size)
    with (
        mock.patch.object(module, "SHARED_MEMORY", Path(folder)),
        mock.patch.object(os, "posix_fallocate", allocator(full)),
    ):
        shared = comm.shared_memory is not None
    for step in range(20):
        gathered = comm.gather_counts([step, -1, here.rank, 0])
        received = comm.exchange_counts([10 * here.rank + owner for owner in range(4)])
    return shared, gathered, received, comm.sent_bytes


def allocator(full: bool) -> Callable[..., None]:
    def fail(*arguments: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    return fail if full else os.posix_fallocate


@needs_ranks
@pytest.mark.parametrize(("exists", "full"), [(True, False), (True, True), (False, False)])
def test_counts_are_the_same_with_and_without_shared_memory(exists: bool, full: bool, tmp_path: Path) -> None:
    folder = tmp_path if exists else tmp_path / "missing"
    for rank, (shared, gathered, received, sent) in enumerate(run_on_ranks(4, counted, str(folder), full)):
        assert shared == (exists and not full)
        assert gathered == [[19, -1, peer, 0] for peer in range(4)]
        assert received == [10 * peer + rank for peer in range(4)]
        assert sent == [0 if peer == rank else 20 * (4 + 1) * 8 for peer in range(4)]
    assert not exists or not list(tmp_path.iterdir())
