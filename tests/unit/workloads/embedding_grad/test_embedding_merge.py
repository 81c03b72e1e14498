"""Parts of an exchange that need no process group."""

from __future__ import annotations

from typing import Any

import pytest

from tpbench.workloads.embedding_grad.row_operations.merge import join_adjacent
from tpbench.workloads.embedding_grad.traffic.collectives import CountedCollectives


@pytest.mark.parametrize(
    ("segments", "joined"),
    [
        ([(0, 2), (2, 3), (5, 1)], [(0, 6)]),
        ([(0, 2), (0, 0), (2, 3)], [(0, 5)]),
        ([(0, 2), (4, 1)], [(0, 2), (4, 1)]),
        ([(0, 0), (7, 0)], []),
    ],
)
def test_adjacent_segments_are_joined(segments: list[tuple[int, int]], joined: list[tuple[int, int]]) -> None:
    assert join_adjacent(segments) == joined


def test_own_rows_cannot_be_pushed() -> None:
    no_group: Any = None
    with pytest.raises(ValueError, match="rank 1 would send itself 5 bytes"):
        CountedCollectives(no_group, 1, 2).count_push([0, 5])
