"""The bytes that a step sends, the collectives that are timed as its communication, and the ring's overlap."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tests.support.tp_block import block_context, problem, run_once
from tpbench.comm.parallel_linears import SequentialSchedule
from tpbench.workloads.tp_block import limits
from tpbench.workloads.tp_block.execution.measurements import StepCollectives
from tpbench.workloads.tp_block.execution.prepared import prepare
from tpbench.workloads.tp_block.execution.ring import RingSchedule

needs_ranks = pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs, or none")
PARTS_AND_KEEPS = list(itertools.product(["block", "column", "row"], [True, False]))
"""Parts of the block, and whether gathered inputs are kept."""


class CountingSchedule(SequentialSchedule):
    """Counts the bytes that it sends."""

    sent = 0

    def gather(self, shard: torch.Tensor) -> Any:
        self.sent += shard.nbytes * (self.size - 1)
        return super().gather(shard)

    def scatter(self, partial: torch.Tensor) -> torch.Tensor:
        self.sent += partial.nbytes * (self.size - 1) // self.size
        return super().scatter(partial)


def bytes_sent(here: Rank) -> list[tuple[int, int]]:
    """The bytes that a step sends, and the counted ones, by part and whether gathered inputs are kept."""
    both = []
    for part, keep in PARTS_AND_KEEPS:
        cell = problem(part=part, save_gathered=keep)
        schedule = CountingSchedule(here.group)
        run_once(cell, prepare(block_context(here, cell), schedule))
        norms = len(cell.norms) * 2 * cell.hidden * 8 * (here.world_size - 1) // here.world_size
        both.append((schedule.sent + norms, limits.bytes_sent(cell, here.world_size)))
    return both


@needs_ranks
def test_a_step_sends_the_counted_bytes() -> None:
    for both in run_on_ranks(2, bytes_sent):
        assert len(both) == len(PARTS_AND_KEEPS)
        for sent, counted in both:
            assert sent == counted


def timed_collectives(here: Rank) -> list[tuple[list[str], int]]:
    """The collectives that are timed as a step's communication, and the counted bytes, in the same order."""
    both: list[tuple[list[str], int]] = []
    for part, keep in PARTS_AND_KEEPS:
        cell = problem(part=part, save_gathered=keep)
        timed = StepCollectives(block_context(here, cell).inputs)
        names: list[str] = []
        note_matrix, note_norm = (
            lambda *_, name=name, names=names, **__: names.append(name) for name in ("matrix", "norm")
        )
        with (
            mock.patch.object(timed, "gather", note_matrix),
            mock.patch.object(timed, "scatter", note_matrix),
            mock.patch.object(dist, "all_reduce", note_norm),
        ):
            timed.run()
        both.append((names, limits.bytes_sent(cell, here.world_size)))
    return both


@needs_ranks
def test_the_collectives_timed_as_communication_send_the_counted_bytes() -> None:
    cell = problem()
    nbytes = {"matrix": cell.tokens * cell.hidden * 8 // 2, "norm": 2 * cell.hidden * 8 // 2}
    for both in run_on_ranks(2, timed_collectives):
        assert len(both) == len(PARTS_AND_KEEPS)
        for names, counted in both:
            assert sum(nbytes[name] for name in names) == counted


def order_of_events(here: Rank) -> tuple[list[str], list[str]]:
    """The order of sends, reductions, products and waits of a ring, in a gather and in a scatter."""
    ring, order = RingSchedule(here.group), []

    def noted(name: str, function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            order.append(name)
            result = function(*args, **options)
            if isinstance(result, list):
                return [Work(each) for each in result]
            return Work(result) if name == "reduce" else result

        return call

    class Work:
        def __init__(self, work: Any) -> None:
            self.work = work

        def wait(self) -> None:
            order.append("wait")
            self.work.wait()

    rows, matrix = torch.ones(4, 3, device=here.device), torch.ones(3, 2, device=here.device)
    patched = {(dist, "batch_isend_irecv"): "send", (dist, "reduce"): "reduce", (torch, "mm"): "product"}
    with contextlib.ExitStack() as stack:
        for (module, name), word in patched.items():
            stack.enter_context(mock.patch.object(module, name, noted(word, getattr(module, name))))
        ring.gather_matmul(rows, matrix)
        gather, order[:] = list(order), []
        finish = ring.matmul_scatter(rows, matrix)
        before_finish = list(order)
        finish()
    return gather, before_finish


@needs_ranks
def test_the_ring_sends_before_each_product_and_waits_after_it() -> None:
    """Results would be the same without any overlap."""
    for gather, scatter in run_on_ranks(2, order_of_events):
        assert [name for name, _ in itertools.groupby(gather)] == ["send", "product", "wait", "product"]
        assert scatter == ["product", "reduce"] * 4  # no wait before the last reduction has started
