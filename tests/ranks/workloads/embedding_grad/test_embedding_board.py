"""Counts through a page that ranks share: right in any order of arrival, and nothing left behind."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tpbench.comm import shared_memory_all_gather as module
from tpbench.comm.shared_memory_all_gather import Board
from tpbench.workloads.embedding_grad.wire import Wire

needs_ranks = pytest.mark.skipif(not enough_gpus(4), reason="needs 4 GPUs, or none")


def test_each_hears_the_numbers_of_this_exchange_whoever_comes_late() -> None:
    ranks, turns = 3, 40
    words = np.zeros((2, ranks, ranks), dtype=np.int64)
    random = np.random.default_rng(0).integers(0, 2, (turns, ranks)) * 1e-3

    def numbers(turn: int) -> list[list[int]]:
        return [[-1, 2**31 - 1, turn * ranks + rank] for rank in range(ranks)]

    def work(rank: int) -> None:
        mine = Board(words, rank)
        for turn in range(turns):
            time.sleep(random[turn, rank])
            assert mine.gather(numbers(turn)[rank]) == numbers(turn)

    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(work, range(ranks)))


def test_nobody_leaves_before_all_have_come() -> None:
    words = np.zeros((2, 2, 2), dtype=np.int64)
    first = threading.Thread(target=Board(words, 0).gather, args=([1, 2],))
    first.start()
    first.join(0.05)
    assert first.is_alive()
    assert Board(words, 1).gather([3, 4]) == [[1, 2], [3, 4]]
    first.join(10)
    assert not first.is_alive()


def test_its_page_is_really_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No hole left to be filled by who first writes: that would be SIGBUS where there is no room."""
    monkeypatch.setattr(module, "SHARED", tmp_path)
    file = module.allotted(16 * 2**10)
    assert file is not None
    assert file.stat().st_size == 16 * 2**10 <= file.stat().st_blocks * 512


def counted(here: Rank, shared: str, full: bool = False) -> tuple[bool, list[list[int]], list[int], list[int]]:
    """Whether there is a board, and what everybody's counts and those for this rank are, many times over."""
    wire = Wire(here.group, here.rank, here.world_size)
    with mock.patch.object(module, "SHARED", Path(shared)), mock.patch.object(os, "posix_fallocate", room(full)):
        has = wire.board is not None
    for turn in range(20):
        everybodys = wire.gather_counts([turn, -1, here.rank, 0])
        mine = wire.exchange_counts([10 * here.rank + owner for owner in range(4)])
    return has, everybodys, mine, wire.to_peer


def room(full: bool) -> Callable[..., None]:
    def none(*arguments: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    return none if full else os.posix_fallocate


@needs_ranks
@pytest.mark.parametrize(("there", "full"), [(True, False), (True, True), (False, False)])
def test_counts_are_the_same_with_and_without_it(there: bool, full: bool, tmp_path: Path) -> None:
    folder = tmp_path if there else tmp_path / "missing"
    for rank, (has, everybodys, mine, sent) in enumerate(run_on_ranks(4, counted, str(folder), full)):
        assert has == (there and not full)
        assert everybodys == [[19, -1, each, 0] for each in range(4)]
        assert mine == [10 * each + rank for each in range(4)]
        assert sent == [0 if peer == rank else 20 * (4 + 1) * 8 for peer in range(4)]
    assert not there or not list(tmp_path.iterdir())
