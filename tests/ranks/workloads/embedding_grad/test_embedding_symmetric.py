"""The exchange through shared memory without GPUs: ranks take turns in one process, phase by phase, and their inboxes
are plain tensors. What it does with real peers shows where there are GPUs, in the tests of all variants."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.embedding_grad import DISTRIBUTIONS, DTYPES, context, problem
from tpbench.workloads.embedding_grad import EmbeddingGrad, traffic
from tpbench.workloads.embedding_grad.index import CpuIndex, Found
from tpbench.workloads.embedding_grad.inputs import Inputs
from tpbench.workloads.embedding_grad.merge import MisplacedRow
from tpbench.workloads.embedding_grad.oracle import TOLERANCE
from tpbench.workloads.embedding_grad.push_kernel import push_rows
from tpbench.workloads.embedding_grad.symmetric import Inbox, SparseSymmetric, addresses
from tpbench.workloads.embedding_grad.wire import Wire

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled: they need memory of GPUs")


def all_ranks(cell: EmbeddingGrad, ranks: int, tokens: list[Tensor] | None = None) -> list[SparseSymmetric]:
    """Every rank's exchange; what nobody wrote in its inbox is NaN."""
    inputs = [Inputs(cell, context(rank=rank, ranks=ranks), tokens) for rank in range(ranks)]
    rows_each = inputs[0].owners.rows_each
    nobody: Any = None
    inboxes: list[list[Inbox]] = [[] for _ in inputs]
    for _ in range(2):
        values = [each.grad.new_full((ranks - 1, rows_each, cell.width), torch.nan) for each in inputs]
        marks = [torch.zeros(ranks, rows_each, dtype=torch.int32) for _ in inputs]
        for rank, own in enumerate(inboxes):
            own.append(Inbox(values[rank], marks[rank], addresses(values), addresses(marks)))
    return [
        SparseSymmetric(each, Wire(nobody, rank, ranks), CpuIndex(each, pinned=False), inboxes[rank], lambda: None, 0.0)
        for rank, each in enumerate(inputs)
    ]


def exchange(every: list[SparseSymmetric]) -> list[Tensor]:
    """One iteration: each phase on all ranks before the next."""
    for one in every:
        one.wire.reset()
    for phases in zip(*(one.phases for one in every), strict=True):
        for phase in phases:
            phase.run()
    return [one.result() for one in every]


def mean(every: list[SparseSymmetric]) -> tuple[Tensor, Tensor]:
    """The right one of the whole table, and that of sizes, with which rounding is compared."""
    grads = torch.stack([one.inputs.grad.double() for one in every])
    return grads.mean(0), grads.abs().mean(0)


def check(every: list[SparseSymmetric]) -> None:
    """One iteration is right, and sends what the formula says."""
    right, sizes = mean(every)
    result = torch.cat(exchange(every)).double()
    error = (result - right).norm(dim=1)
    assert (error <= TOLERANCE[every[0].inputs.problem.dtype] * sizes.norm(dim=1)).all(), error
    assert [sum(one.wire.to_peer) for one in every] == every[0].formula()


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_every_distribution_is_merged_as_the_dense_mean(distribution: str, ranks: int) -> None:
    for dtype in DTYPES:
        check(all_ranks(problem(distribution=distribution, dtype=dtype), ranks))


rows_of = st.lists(st.integers(0, 39), max_size=30)


@settings(max_examples=60, deadline=None)
@given(
    ranks=st.sampled_from((2, 3, 4)),
    steps=st.lists(st.lists(rows_of, min_size=4, max_size=4), min_size=1, max_size=4),
    width=st.sampled_from((1, 8, 33)),
)
def test_what_earlier_exchanges_left_in_an_inbox_is_not_seen(
    ranks: int, steps: list[list[list[int]]], width: int
) -> None:
    cell = problem(table_rows=40, width=width, dtype="float32")
    every = all_ranks(cell, ranks)
    for rows in steps:
        tokens = [torch.tensor(each, dtype=torch.int32).view(1, -1) for each in rows[:ranks]]
        for rank, one in enumerate(every):
            anew = Inputs(cell, context(rank=rank, ranks=ranks), tokens)
            one.inputs, one.index = anew, CpuIndex(anew, pinned=False)
        check(every)
        leaving = traffic.leaving(every[0].inputs.counts)
        assert [sum(one.wire.to_peer) for one in every] == [rows * (4 * width + 4) for rows in leaving]


def test_a_rank_one_exchange_ahead_disturbs_nobody() -> None:
    """The others have met it twice before it writes the same inbox again, not before it writes the other one."""
    every = all_ranks(problem(distribution="fixed", tokens=50, dtype="float32"), 2)
    right, _ = mean(every)
    for one in every:
        one.find()
        one.push()
    ahead = every[0]
    ahead.merge()
    ahead.inputs.grad.fill_(7.0)
    ahead.find()
    ahead.push()
    every[1].merge()
    torch.testing.assert_close(every[1].result().double(), every[1].inputs.slice_of(right), rtol=1e-6, atol=1e-6)


def test_parts_are_added_in_the_order_of_ranks() -> None:
    """1 + 2^60 - 2^60 in fp32 is 0 from the left and 1 from the right: all owners have the sum from the left."""
    every = all_ranks(problem(table_rows=3, width=4, dtype="float32", distribution="fixed", tokens=3, accumulate=1), 3)
    for one, value in zip(every, (1.0, 2.0**60, -(2.0**60)), strict=True):
        one.inputs.grad.fill_(value)
    assert torch.equal(torch.cat(exchange(every)), torch.zeros(3, 4))


@pytest.mark.parametrize("blocks", [(1, 8), (4, 8), (16, 32)])
def test_programs_of_any_size_push_each_row_once(blocks: tuple[int, int]) -> None:
    ranks, rows_each, width, rank = 3, 10, 20, 1
    grad = torch.arange(1.0, 1 + ranks * rows_each * width).view(-1, width)
    rows = torch.tensor([0, 3, 9, 20, 21, 22, 23, 29, 10, 14, 19], dtype=torch.int32)
    values = [torch.zeros(ranks - 1, rows_each, width) for _ in range(ranks)]
    marks = [torch.zeros(ranks, rows_each, dtype=torch.int32) for _ in range(ranks)]
    misplaced = torch.zeros(1, dtype=torch.int32)
    push_rows(
        grad, rows, addresses(values), addresses(marks),
        epoch=7, rank=rank, rows_each=rows_each, misplaced=misplaced, blocks=blocks,
    )  # fmt: skip
    for owner, (arrived, marked) in enumerate(zip(values, marks, strict=True)):
        mine = [int(row) - owner * rows_each for row in rows if row // rows_each == owner]
        assert marked.nonzero().tolist() == [[rank, row] for row in mine] and marked.max() == 7
        right = torch.zeros_like(arrived)
        if owner != rank:  # the owner's slices are of ranks 1, 2 or 0, 1
            right[0 if owner == 0 else 1][mine] = grad[owner * rows_each :][mine]
        assert torch.equal(arrived, right)


@pytest.mark.parametrize("row", [-1, 102])
def test_rows_outside_the_table_are_written_nowhere(row: int) -> None:
    every = all_ranks(problem(), 2)
    lists = Found([0, 1], lambda: torch.tensor([60, row], dtype=torch.int32))
    every[0].index = type("Wrong", (), {"find": lambda self: lists})()
    with pytest.raises(MisplacedRow, match="rank 0 touched 1 rows"):
        exchange(every)


def test_own_rows_cannot_be_pushed() -> None:
    nobody: Any = None
    with pytest.raises(ValueError, match="rank 1 would send itself 5 bytes"):
        Wire(nobody, 1, 2).push([0, 5])
