"""The bytes that a step sends, the collectives that are timed as its communication, and the ring's overlap."""

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
from tpbench.workloads.tp_block.bench import step_collectives
from tpbench.workloads.tp_block.execution.prepared import prepare
from tpbench.workloads.tp_block.execution.torch_schedules import RingSchedule
from tpbench.workloads.tp_block.problem import bytes_sent

pytestmark = pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs, or none")


class CountingSchedule(SequentialSchedule):
    """Counts the bytes that it sends."""

    sent = 0

    def gather(self, shard: torch.Tensor) -> Any:
        self.sent += shard.nbytes * (self.size - 1)
        return super().gather(shard)

    def scatter(self, partial: torch.Tensor) -> torch.Tensor:
        self.sent += partial.nbytes * (self.size - 1) // self.size
        return super().scatter(partial)


def sent_bytes(here: Rank) -> list[tuple[int, int, int]]:
    """The bytes that a step sends, those of the collectives that are timed alone, and the counted ones."""
    found = []
    for part, keep in itertools.product(["block", "column", "row"], [True, False]):
        cell = problem(part=part, save_gathered=keep)
        context = block_context(here, cell)
        schedule = CountingSchedule(here.group)
        run_once(cell, prepare(context, schedule))
        of_norms = len(cell.norms) * 2 * cell.hidden * 8 * (here.world_size - 1) // here.world_size
        timed = step_collectives(context.inputs)
        shard_bytes = cell.tokens // here.world_size * cell.hidden * 8
        matrices = (timed["gather"][1] + timed["scatter"][1]) * shard_bytes * (here.world_size - 1)
        assert timed["reduce"][1] == len(cell.norms)
        found.append((schedule.sent + of_norms, matrices + of_norms, bytes_sent(cell, here.world_size)))
    return found


def test_a_step_and_the_collectives_timed_as_its_communication_send_the_counted_bytes() -> None:
    for of_parts in run_on_ranks(2, sent_bytes):
        for sent, timed, counted in of_parts:
            assert sent == timed == counted


def order_of_events(here: Rank) -> tuple[list[str], list[str]]:
    """The order of sends, reductions, products and waits of a ring, in a gather and in a scatter."""
    ring, order = RingSchedule(here.group), []

    def noted(name: str, function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            order.append(name)
            result = function(*args, **options)
            if isinstance(result, list):
                return [Work(work) for work in result]
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


def test_the_ring_sends_before_each_product_and_waits_after_it() -> None:
    """Results would be the same without any overlap."""
    for gather, scatter in run_on_ranks(2, order_of_events):
        assert [name for name, _ in itertools.groupby(gather)] == ["send", "product", "wait", "product"]
        assert scatter == ["product", "reduce"] * 4  # no wait before the last reduction has started
