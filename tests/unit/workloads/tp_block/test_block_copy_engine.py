"""The copy engine's schedule without GPUs: on streams in simulated time, at any speed of products and transfers.

This checks addresses, the order of signals, alternating buffers, sums, and which transfers are hidden. The speed of
products and copies can only be measured on GPUs.
"""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.tp_block_simulated import Costs, Machine, SimulatedBuffers, on_streams
from tpbench.comm import parallel_linears
from tpbench.workloads.tp_block.execution import copy_engine
from tpbench.workloads.tp_block.execution.copy_engine import CopyEngineSchedule

Installs = Callable[[Machine], None]
streams = on_streams


def queued(machine: Machine, ranks: int, work: Callable[[CopyEngineSchedule], Any]) -> list[Any]:
    """Queue every rank's work and return its results, which are not computed yet."""
    found = []
    for rank in range(ranks):
        machine.issuing = rank
        engine = CopyEngineSchedule(SimulatedBuffers(machine, rank, ranks))
        with machine.rank():
            found.append(work(engine))
    return found


def numbers(rank: int, turn: int, rows: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * turn + rank)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64)


def at_random(seed: int) -> Costs:
    """Return random costs: any operation may take a hundred times longer than another."""
    generator = random.Random(seed)
    return lambda kind, amount: 10 ** generator.uniform(-1, 1) * (0.1 if kind == "signal" else 1.0)


SIZES = ((2, 3, 5), (4, 6, 2), (1, 2, 3))
"""Rows of a shard, and a linear's features. They change, so that buffers alternate, are reused and grow."""


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_operations_in_a_row_are_right_at_any_speed(
    ranks: int, pieces: bool, streams: Installs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pieces`: sums are large enough to be computed in two pieces."""
    if pieces:
        monkeypatch.setattr(copy_engine, "MIN_PIECE_ELEMENTS", 1)

    def work(engine: CopyEngineSchedule) -> list[tuple[Tensor, ...]]:
        found = []
        for turn in range(8):
            rows, k, n = SIZES[turn % 3]
            shard, weight = numbers(engine.rank, turn, rows, k), numbers(engine.rank, turn + 50, n, k)
            grad, saved = numbers(engine.rank, turn + 20, rows * ranks, n), turn % 2 == 0
            whole, product = engine.gather_matmul(shard, weight.t(), keep=saved)
            kept = whole() if saved else shard
            found.append((kept, product, *parallel_linears.column_backward(engine, grad, weight, kept, saved)))
            summed = engine.matmul_scatter(grad, weight, awaited=True)()
            found.append((summed, *parallel_linears.row_backward(engine, shard, grad, weight.t())))
        return found

    for seed in range(6):
        streams(machine := Machine(at_random(seed)))
        found = queued(machine, ranks, work)
        machine.run()
        for rank, of_rank in enumerate(found):
            for turn in range(8):
                rows, k, n = SIZES[turn % 3]
                whole = torch.cat([numbers(each, turn, rows, k) for each in range(ranks)])
                grads = [numbers(each, turn + 20, rows * ranks, n) for each in range(ranks)]
                weights = [numbers(each, turn + 50, n, k) for each in range(ranks)]
                total = torch.stack([a @ b for a, b in zip(grads, weights, strict=True)]).sum(0).chunk(ranks)[rank]
                of_weight = grads[rank].t() @ whole
                kept = whole.chunk(ranks)[rank] if turn % 2 else whole
                expected = kept, whole @ weights[rank].t(), total, of_weight
                torch.testing.assert_close(of_rank[2 * turn], expected)
                expected = total, whole @ weights[rank].t(), of_weight.t()
                torch.testing.assert_close(of_rank[2 * turn + 1], expected)


@pytest.mark.parametrize("operations", ["g", "s", "gs", "sss", "gsg"])
def test_replays_of_a_graph_are_right_at_any_speed(
    operations: str, streams: Installs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each replay gathers (g) and scatters (s) in the buffers of the capture, behind one barrier."""
    rows, k, n, ranks, replays = 2, 3, 4, 2, 5

    def work(engine: CopyEngineSchedule) -> list[Tensor]:
        first, found = Counter(engine.buffers.uses), []
        for _ in range(replays):
            engine.buffers.uses, engine.buffers.capturing = Counter(first), False
            for operation in operations:
                number = len(found)
                shard, matrix = numbers(engine.rank, number, rows, k), numbers(engine.rank, number + 50, k, n)
                gathers = operation == "g"
                found.append(
                    engine.gather_matmul(shard, matrix)[1] if gathers else engine.matmul_scatter(shard, matrix)()
                )
        assert isinstance(engine.buffers, SimulatedBuffers) and engine.buffers.barriers == replays
        return found

    for seed in range(8):
        streams(machine := Machine(at_random(seed)))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        found = queued(machine, ranks, work)
        machine.run()
        for number, operation in enumerate(operations * replays):
            shards = [numbers(rank, number, rows, k) for rank in range(ranks)]
            matrices = [numbers(rank, number + 50, k, n) for rank in range(ranks)]
            parts = [shard @ matrix for shard, matrix in zip(shards, matrices, strict=True)]
            total = torch.stack(parts).sum(0).chunk(ranks)
            for rank, of_rank in enumerate(found):
                right = torch.cat(shards) @ matrices[rank] if operation == "g" else total[rank]
                torch.testing.assert_close(of_rank[number], right)


def test_a_sum_goes_around_the_ring_to_its_owner(streams: Installs) -> None:
    """In fp32, (1 + 2^60) - 2^60 is 0. Only rank 0's sum starts at rank 1 and ends with its own part."""
    values = torch.tensor([1.0, 2.0**60, -(2.0**60)])

    def work(engine: CopyEngineSchedule) -> Tensor:
        return engine.matmul_scatter(values[engine.rank].expand(3, 1).contiguous(), torch.ones(1, 4))()

    streams(machine := Machine(at_random(0)))
    found = queued(machine, 3, work)
    machine.run()
    assert [float(each[0, 0]) for each in found] == [1.0, 0.0, 0.0]


ROWS, IN, OUT = 64, 16, 32
"""Tokens and local features of a row-parallel linear. A column-parallel linear swaps the features."""
OPERATIONS: dict[str, Callable[[CopyEngineSchedule], Any]] = {
    "row forward": lambda engine: engine.matmul_scatter(torch.zeros(ROWS, IN), torch.zeros(IN, OUT), awaited=True)(),
    "row backward": lambda engine: parallel_linears.row_backward(
        engine, torch.zeros(ROWS // engine.size, OUT), torch.zeros(ROWS, IN), torch.zeros(OUT, IN)
    ),
    "column forward": lambda engine: engine.gather_matmul(torch.zeros(ROWS // engine.size, OUT), torch.zeros(OUT, IN))[
        0
    ](),
    "column backward": lambda engine: parallel_linears.column_backward(
        engine, torch.zeros(ROWS, IN), torch.zeros(IN, OUT), torch.zeros(ROWS, OUT), True
    ),
}


@pytest.mark.parametrize(
    ("name", "ranks", "pieces", "kinds"),
    [
        # Copies are hidden, as transfers are.
        *((name, ranks, True, {"product"}) for name in OPERATIONS for ranks in (2, 4)),
        # A small sum is added after the own product, which hides its transfer.
        ("row forward", 2, False, {"product", "add"}),
        ("column backward", 2, False, {"product"}),
    ],
)
def test_transfers_of_half_a_product_are_hidden(
    name: str, ranks: int, pieces: bool, kinds: set[str], streams: Installs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product of all rows takes 1. A transfer takes half of the time of the product of one rank's rows."""
    if pieces:
        monkeypatch.setattr(copy_engine, "MIN_PIECE_ELEMENTS", 1)
    costs = {"product": 1 / (ROWS * IN * OUT), "transfer": 0.5 / (ROWS * OUT)}
    streams(machine := Machine(lambda kind, amount: costs.get(kind, 0.0) * amount))
    queued(machine, ranks, OPERATIONS[name])
    assert machine.run() == pytest.approx(2.0 if name.endswith("backward") else 1.0, abs=1e-6)
    assert {kind for stream, kind in machine.log if stream is machine.streams[2]} == kinds
