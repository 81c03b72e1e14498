"""The all-gather through shared memory, with threads as ranks: right in any order of arrival."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tpbench.comm.shared_memory_all_gather import SharedMemoryAllGather


def test_every_rank_gets_the_numbers_of_the_current_epoch() -> None:
    ranks, epochs = 3, 40
    words = np.zeros((2, ranks, ranks), dtype=np.int64)
    delays = np.random.default_rng(0).integers(0, 2, (epochs, ranks)) * 1e-3

    def numbers(epoch: int) -> list[list[int]]:
        return [[-1, 2**31 - 1, epoch * ranks + rank] for rank in range(ranks)]

    def work(rank: int) -> None:
        endpoint = SharedMemoryAllGather(words, rank)
        for epoch in range(epochs):
            time.sleep(delays[epoch, rank])
            assert endpoint.gather(numbers(epoch)[rank]) == numbers(epoch)

    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(work, range(ranks)))


def test_no_rank_leaves_before_all_have_come() -> None:
    words = np.zeros((2, 2, 2), dtype=np.int64)
    first = threading.Thread(target=SharedMemoryAllGather(words, 0).gather, args=([1, 2],))
    first.start()
    first.join(0.05)
    assert first.is_alive()
    assert SharedMemoryAllGather(words, 1).gather([3, 4]) == [[1, 2], [3, 4]]
    first.join(10)
    assert not first.is_alive()
