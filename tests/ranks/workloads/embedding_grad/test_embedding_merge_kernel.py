"""The merge kernel by itself: sums by hand, blocks of any size, rows that are not there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tpbench.workloads.embedding_grad.merge import joined
from tpbench.workloads.embedding_grad.merge_kernel import BLOCKS, Blocks, merge_rows, place_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROOT = Path(__file__).resolve().parents[4]


@settings(max_examples=25, deadline=None)
@given(
    rows_each=st.integers(1, 70),
    width=st.integers(1, 40),
    ranks=st.integers(2, 5),
    ids=st.sampled_from((torch.int32, torch.int64)),
    blocks=st.sampled_from((BLOCKS, Blocks(16, 4, 16))),
    data=st.data(),
)
def test_it_sums_each_row_over_ranks(
    rows_each: int, width: int, ranks: int, ids: torch.dtype, blocks: Blocks, data: st.DataObject
) -> None:
    rank, first = data.draw(st.integers(0, ranks - 1)), data.draw(st.integers(0, 1000))
    held = [sorted(data.draw(st.sets(st.integers(0, rows_each - 1)))) for _ in range(ranks)]
    torch.manual_seed(0)
    own = torch.zeros(rows_each, width)
    own[held[rank]] = torch.randn(len(held[rank]), width)
    lists = [torch.tensor(each, dtype=ids) + first for each in held]
    segments, start, right = [], 3, own.double()  # a gap: rows that are nobody's
    received = torch.randn(3 + sum(map(len, held)), width)
    rows = torch.full((len(received),), first, dtype=ids)
    for source, each in enumerate(held):
        if source == rank:
            segments.append((0, 0))
            continue
        segments.append((start, len(each)))
        rows[start : start + len(each)] = lists[source]
        right[each] += received[start : start + len(each)].double()
        start += len(each)
    table = torch.empty(ranks, rows_each, dtype=torch.int32, device=DEVICE)
    misplaced = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    merged = own.to(DEVICE)
    place_rows(
        lists[rank].to(DEVICE), rows.to(DEVICE), segments, rank=rank, first_row=first, table=table, misplaced=misplaced
    )
    merge_rows(merged, received.to(DEVICE), table, rank=rank, scale=1 / ranks, blocks=blocks)
    torch.testing.assert_close(merged.cpu().double(), right / ranks, rtol=1e-6, atol=1e-6)
    assert int(misplaced) == 0


def test_rows_of_others_are_counted_and_left_out() -> None:
    own = torch.ones(4, 2, device=DEVICE)
    rows = torch.tensor([9, 12, 14, 99], dtype=torch.int32, device=DEVICE)
    table = torch.empty(2, 4, dtype=torch.int32, device=DEVICE)
    misplaced = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    place_rows(rows[:0], rows, [(0, 0), (0, 4)], rank=0, first_row=10, table=table, misplaced=misplaced)
    merge_rows(own, torch.full((4, 2), 6.0, device=DEVICE), table, rank=0, scale=0.5)
    assert int(misplaced) == 3  # 12 is row 2; 9 and 14 lie just outside
    assert own[:, 0].tolist() == [1.0, 1.0, 3.0, 1.0]


@pytest.mark.parametrize(
    ("segments", "found"),
    [
        ([(0, 2), (2, 3), (5, 1)], [(0, 6)]),
        ([(0, 2), (0, 0), (2, 3)], [(0, 5)]),
        ([(0, 2), (4, 1)], [(0, 2), (4, 1)]),
        ([(0, 0), (7, 0)], []),
    ],
)
def test_segments_that_touch_are_one(segments: list[tuple[int, int]], found: list[tuple[int, int]]) -> None:
    assert joined(segments) == found


def test_the_kernel_needs_nothing_else_of_this_package() -> None:
    file = ROOT / "tpbench/workloads/embedding_grad/merge_kernel.py"
    probe = f"import runpy, sys; runpy.run_path({str(file)!r}); sys.exit('tpbench' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], cwd="/").returncode == 0
