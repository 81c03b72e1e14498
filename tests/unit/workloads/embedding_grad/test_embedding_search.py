"""Search for the touched rows on the CPU, the buffers through which they go to the GPU, and replays of GPU work."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.embedding_grad import context, problem
from tpbench.workloads.embedding_grad.exchanges.by_collectives import equal_time, sparse_is_faster
from tpbench.workloads.embedding_grad.inputs import EmbeddingGradInputs, busiest
from tpbench.workloads.embedding_grad.row_operations.search import CpuRowFinder, PinnedRing


def found(*steps: list[int], rank: int = 0) -> CpuRowFinder:
    inputs = EmbeddingGradInputs(problem(table_rows=7), context(rank=rank))
    return CpuRowFinder(inputs, tokens=torch.tensor(steps, dtype=torch.int32))


@pytest.mark.parametrize(("rank", "rows"), [(0, [5, 6, 1, 3]), (1, [1, 3, 5, 6])])
def test_rows_of_all_steps_are_listed_once_with_the_own_rows_last(rank: int, rows: list[int]) -> None:
    finder = found([5, 1, 5], [6, 1, 3], rank=rank)
    for _ in range(2):  # a second search starts anew
        touched = finder.find()
        assert touched.counts == [2, 2] and touched.rows.tolist() == rows


class LateRing(PinnedRing):
    """Ring whose device copies only when the host waits, like a device that is far behind the host."""

    def __init__(self) -> None:
        super().__init__(4, torch.device("cpu"))
        self.waits = 0

    def copy(self, filled: torch.Tensor, out: torch.Tensor) -> Any:
        def finish() -> None:
            self.waits += 1
            out.copy_(filled)

        return mock.Mock(synchronize=finish)


def test_a_pinned_buffer_is_not_written_before_its_copy_ended() -> None:
    ring = LateRing()
    uploaded = [torch.full((3,), -1, dtype=torch.int32) for _ in range(6)]
    for step, out in enumerate(uploaded):
        ring.upload(lambda buffer, step=step: buffer.fill_(step), out)  # type: ignore[misc]
    assert ring.waits == 4  # and no more waits than necessary
    assert [numbers.tolist() for numbers in uploaded[:4]] == [[step] * 3 for step in range(4)]


def test_the_busiest_rank_decides_between_dense_and_sparse() -> None:
    counts = [[5, 3, 0], [0, 9, 1], [2, 2, 2]]  # ranks send 3, 1 and 4 rows, and receive 2, 5 and 1
    assert busiest(counts) == 5
    assert sparse_is_faster(counts, table_rows=30, limit=0.25)  # 5 rows of others, as if 7.5 of 30 were touched
    assert not sparse_is_faster(counts, table_rows=30, limit=0.24)
    assert sparse_is_faster([[0, 0], [0, 0]], table_rows=1, limit=0.0)


def test_the_limit_lies_on_the_line_through_two_times() -> None:
    assert equal_time((0.2, 1.0), (0.8, 2.0), 1.5) == pytest.approx(0.5)
    assert equal_time((0.2, 1.0), (0.8, 1.0), 2.0) == float("inf")
    assert equal_time((0.2, 1.0), (0.8, 0.9), 0.5) == 0.0
