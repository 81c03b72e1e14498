"""The merge kernel alone: sums by hand, blocks of any size, rows that are not the owner's."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tpbench.workloads.embedding_grad.row_operations.merge_kernel import BLOCKS, Blocks, merge_rows, place_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@settings(max_examples=25, deadline=None)
@given(
    rows_per_rank=st.integers(1, 70),
    width=st.integers(1, 40),
    ranks=st.integers(2, 5),
    ids=st.sampled_from((torch.int32, torch.int64)),
    blocks=st.sampled_from((BLOCKS, Blocks(16, 4, 16))),
    data=st.data(),
)
def test_each_row_is_summed_over_ranks(
    rows_per_rank: int, width: int, ranks: int, ids: torch.dtype, blocks: Blocks, data: st.DataObject
) -> None:
    rank, first_row = data.draw(st.integers(0, ranks - 1)), data.draw(st.integers(0, 1000))
    held = [sorted(data.draw(st.sets(st.integers(0, rows_per_rank - 1)))) for _ in range(ranks)]
    torch.manual_seed(0)
    own = torch.zeros(rows_per_rank, width)
    own[held[rank]] = torch.randn(len(held[rank]), width)
    own_rows = torch.tensor(held[rank], dtype=ids) + first_row
    segments, start, expected = [], 3, own.double()  # the first 3 received rows belong to no segment
    received = torch.randn(3 + sum(map(len, held)), width)
    rows = torch.full((len(received),), first_row, dtype=ids)
    for source, touched in enumerate(held):
        if source == rank:
            segments.append((0, 0))
            continue
        segments.append((start, len(touched)))
        rows[start : start + len(touched)] = torch.tensor(touched, dtype=ids) + first_row
        expected[touched] += received[start : start + len(touched)].double()
        start += len(touched)
    table = torch.empty(ranks, rows_per_rank, dtype=torch.int32, device=DEVICE)
    misplaced = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    merged, own_rows, rows = own.to(DEVICE), own_rows.to(DEVICE), rows.to(DEVICE)
    place_rows(own_rows, rows, segments, rank=rank, first_row=first_row, table=table, misplaced=misplaced)
    merge_rows(merged, received.to(DEVICE), table, rank=rank, scale=1 / ranks, blocks=blocks)
    torch.testing.assert_close(merged.cpu().double(), expected / ranks, rtol=1e-6, atol=1e-6)
    assert int(misplaced) == 0


def test_rows_of_other_owners_are_counted_and_left_out() -> None:
    own = torch.ones(4, 2, device=DEVICE)
    rows = torch.tensor([9, 12, 14, 99], dtype=torch.int32, device=DEVICE)
    table = torch.empty(2, 4, dtype=torch.int32, device=DEVICE)
    misplaced = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    place_rows(rows[:0], rows, [(0, 0), (0, 4)], rank=0, first_row=10, table=table, misplaced=misplaced)
    merge_rows(own, torch.full((4, 2), 6.0, device=DEVICE), table, rank=0, scale=0.5)
    assert int(misplaced) == 3  # 12 is row 2; 9 and 14 lie just outside
    assert own[:, 0].tolist() == [1.0, 1.0, 3.0, 1.0]
