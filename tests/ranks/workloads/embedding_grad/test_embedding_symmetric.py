"""The exchange through symmetric memory without GPUs: ranks in one process, phase by phase, with tensors as inboxes.

On GPUs the tests of all variants cover the exchange with real peers.
"""

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.embedding_grad import DISTRIBUTIONS, DTYPES, context, problem, sent_by_formula
from tpbench.workloads.embedding_grad import EmbeddingGrad
from tpbench.workloads.embedding_grad.bench import TOLERANCE
from tpbench.workloads.embedding_grad.exchanges import ExchangeContext, row_kernels, symmetric
from tpbench.workloads.embedding_grad.exchanges.counted import CountedCollectives
from tpbench.workloads.embedding_grad.exchanges.row_kernels import push_rows
from tpbench.workloads.embedding_grad.exchanges.symmetric import Inboxes, addresses
from tpbench.workloads.embedding_grad.inputs import EmbeddingGradInputs

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels need GPU memory")


def all_ranks(cell: EmbeddingGrad, ranks: int, tokens: list[Tensor] | None = None) -> list[Any]:
    """Return the exchange of every rank. Parts of an inbox that no rank wrote are NaN."""
    inputs = [EmbeddingGradInputs(cell, context(rank=rank, ranks=ranks), tokens) for rank in range(ranks)]
    rows_per_rank = inputs[0].rows_per_rank
    no_group: Any = None
    shape = (ranks - 1, rows_per_rank, cell.width)
    values = [[one.grad.new_full(shape, torch.nan) for one in inputs] for _ in range(2)]
    marks = [[torch.zeros(ranks, rows_per_rank, dtype=torch.int32) for _ in inputs] for _ in range(2)]
    inboxes = Inboxes(addresses(values), addresses(marks), lambda kept=(values, marks): None)
    comms = [CountedCollectives(no_group, rank, ranks) for rank in range(ranks)]
    no_stopwatch: Any = None
    with mock.patch.object(symmetric, "connect", lambda inputs: inboxes):
        contexts = [ExchangeContext(one, comm, no_stopwatch) for one, comm in zip(inputs, comms, strict=True)]
        return [symmetric.SparseSymmetric(cell, each) for each in contexts]


def exchange(every: list[Any]) -> list[Tensor]:
    """Run one iteration: each phase on all ranks before the next."""
    for one in every:
        one.comm.reset()
    for phases in zip(*(one.phases for one in every), strict=True):
        for phase in phases:
            phase.run()
    return [one.result() for one in every]


def mean(every: list[Any]) -> tuple[Tensor, Tensor]:
    """Return the mean gradient of the whole table, and the mean of absolute values, which scales rounding errors."""
    grads = torch.stack([one.inputs.grad.double() for one in every])
    return grads.mean(0), grads.abs().mean(0)


def check(every: list[Any]) -> None:
    """Check the result and the sent bytes of one iteration."""
    expected, absolute = mean(every)
    result = torch.cat(exchange(every)).double()
    error = (result - expected).norm(dim=1)
    assert (error <= TOLERANCE[every[0].inputs.problem.dtype] * absolute.norm(dim=1)).all(), error
    assert [sum(one.comm.sent_bytes) for one in every] == sent_by_formula(every[0].inputs, "sparse_symmetric")


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_every_distribution_is_merged_as_the_dense_mean(distribution: str, ranks: int) -> None:
    dtype = DTYPES[ranks % len(DTYPES)]  # each distribution has every dtype once
    every = all_ranks(problem(distribution=distribution, dtype=dtype), ranks)
    saved = [one.inputs.grad.clone() for one in every]
    for _ in range(3 if ranks == 2 else 1):  # the third exchange uses the first inbox again
        for one, grad in zip(every, saved, strict=True):
            one.inputs.grad.copy_(grad)
        check(every)


rows_of = st.lists(st.integers(0, 39), max_size=30)


@settings(max_examples=20, deadline=None)
@given(
    ranks=st.sampled_from((2, 3, 4)),
    steps=st.lists(st.lists(rows_of, min_size=4, max_size=4), min_size=3, max_size=4),
    width=st.sampled_from((1, 8, 33)),
)
def test_rows_of_earlier_exchanges_are_ignored(ranks: int, steps: list[list[list[int]]], width: int) -> None:
    """From the third exchange on an inbox still holds rows of an earlier exchange."""
    cell = problem(table_rows=40, width=width, dtype="float32", tokens=20)
    every = all_ranks(cell, ranks)
    for rows in steps:
        tokens = [torch.tensor(each, dtype=torch.int32).view(1, -1) for each in rows[:ranks]]
        for rank, one in enumerate(every):
            inputs = EmbeddingGradInputs(cell, context(rank=rank, ranks=ranks), tokens)
            one.inputs = inputs
            one.search.tokens = inputs.own_tokens
        check(every)


def test_a_rank_one_exchange_ahead_disturbs_no_other() -> None:
    """Before a rank writes the same inbox again, all ranks pass two barriers; only one before the other inbox."""
    every = all_ranks(problem(distribution="fixed", tokens=50, dtype="float32"), 2)
    expected, _ = mean(every)
    for one in every:
        one.search.run()
        one.push()
    ahead = every[0]
    ahead.merge()
    ahead.inputs.grad.fill_(7.0)
    ahead.search.run()
    ahead.push()
    every[1].merge()
    torch.testing.assert_close(every[1].result().double(), every[1].inputs.slice_of(expected), rtol=1e-6, atol=1e-6)


def test_with_the_search_on_the_gpu_the_host_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph refuses an iteration that reads a number of the device. The kernels themselves are left out."""
    exchange_of_rank_0 = all_ranks(problem(), 2)[0]

    def refuse(*arguments: Any) -> Any:
        raise AssertionError("the host reads a tensor")

    for kernel in ("list_rows", "push_rows", "merge_rows"):
        monkeypatch.setattr(row_kernels, kernel, lambda *arguments, **options: None)
    for reading in ("item", "tolist", "cpu", "numpy", "nonzero", "__int__", "__bool__", "__index__"):
        monkeypatch.setattr(torch.Tensor, reading, refuse)
    for phase in exchange_of_rank_0.phases:
        phase.run()
    with pytest.raises(AssertionError, match="the host reads a tensor"):
        exchange_of_rank_0.result()


def test_parts_are_added_in_the_order_of_ranks() -> None:
    """1 + 2^60 - 2^60 in fp32 is 0 from the left and 1 from the right: all owners must have the sum from the left."""
    every = all_ranks(problem(table_rows=3, width=4, dtype="float32", distribution="fixed", tokens=3, accumulate=1), 3)
    for one, value in zip(every, (1.0, 2.0**60, -(2.0**60)), strict=True):
        one.inputs.grad.fill_(value)
    assert torch.equal(torch.cat(exchange(every)), torch.zeros(3, 4))


@pytest.mark.parametrize("blocks", [(1, 8), (4, 8), (16, 32)])
def test_programs_of_any_size_push_each_row_once(blocks: tuple[int, int]) -> None:
    ranks, rows_per_rank, width, rank = 3, 10, 20, 1
    grad = torch.arange(1.0, 1 + ranks * rows_per_rank * width).view(-1, width)
    rows = torch.tensor([0, 3, 9, 20, 21, 22, 23, 29, 10, 14, 19], dtype=torch.int32)
    values = [torch.zeros(ranks - 1, rows_per_rank, width) for _ in range(ranks)]
    marks = [torch.zeros(ranks, rows_per_rank, dtype=torch.int32) for _ in range(ranks)]
    misplaced = torch.zeros(1, dtype=torch.int32)
    push_rows(
        grad, rows, addresses([values]), addresses([marks]),
        epoch=torch.tensor([7], dtype=torch.int32), rank=rank, misplaced=misplaced,
        count=torch.tensor([len(rows)], dtype=torch.int32), blocks=blocks,
    )  # fmt: skip
    for owner, (arrived, marked) in enumerate(zip(values, marks, strict=True)):
        mine = [int(row) - owner * rows_per_rank for row in rows if row // rows_per_rank == owner]
        assert marked.nonzero().tolist() == [[rank, row] for row in mine] and marked.max() == 7
        expected = torch.zeros_like(arrived)
        if owner != rank:  # the owner's slices belong to ranks 1, 2 or 0, 1
            expected[0 if owner == 0 else 1][mine] = grad[owner * rows_per_rank :][mine]
        assert torch.equal(arrived, expected)


@pytest.mark.parametrize("row", [-1, 102])
def test_rows_outside_the_table_are_an_error(row: int) -> None:
    every = all_ranks(problem(), 2)
    every[0].search.tokens[0, 0] = row
    with pytest.raises(RuntimeError, match="1 tokens have rows that are not of the table"):
        exchange(every)
