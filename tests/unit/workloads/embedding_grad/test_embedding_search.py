"""Search for the touched rows on the CPU, the buffers through which they go to the GPU, and replays of GPU work."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.embedding_grad import context, problem
from tpbench.workloads.embedding_grad.inputs import EmbeddingGradInputs
from tpbench.workloads.embedding_grad.row_operations.search import CpuRowFinder, PinnedRing


def found(*steps: list[int], rank: int = 0) -> CpuRowFinder:
    tokens = torch.tensor(steps, dtype=torch.int32)
    return CpuRowFinder(EmbeddingGradInputs(problem(table_rows=7), context(rank=rank), [tokens, tokens]))


@pytest.mark.parametrize(("rank", "rows"), [(0, [5, 6, 1, 3]), (1, [1, 3, 5, 6])])
def test_rows_of_all_steps_are_listed_once_with_the_own_rows_last(rank: int, rows: list[int]) -> None:
    finder = found([5, 1, 5], [6, 1, 3], rank=rank)
    for _ in range(2):  # a second search starts anew
        assert finder.find() == [2, 2] and finder.rows().tolist() == rows


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
