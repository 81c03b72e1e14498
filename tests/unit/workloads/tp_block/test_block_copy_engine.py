"""The copy engine's schedule without GPUs: on streams in simulated time, at any speed of products and transfers.

That shows the addresses, the order of signals, the alternating buffers and the sums, and what hides behind what; how
fast products and copies are shows on GPUs.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.tp_block_simulated import FLAG_SPACE, Costs, Machine, SharedArena, on_streams
from tpbench.comm.signals import StreamSignals
from tpbench.workloads.tp_block import copy_engine, operations
from tpbench.workloads.tp_block.copy_engine import CopyEngine, peer_runs
from tpbench.workloads.tp_block.local_copy import copy_beside_compute

Installs = Callable[[Machine], None]
streams = on_streams


def queued(machine: Machine, ranks: int, work: Callable[[CopyEngine], Any], merged: bool = False) -> list[Any]:
    """What each rank's work returns, before any of it has happened."""
    found = []
    for rank in range(ranks):
        machine.issuing = rank
        engine = CopyEngine(SharedArena(machine, rank, ranks), merged=merged)
        with machine.rank():
            found.append(work(engine))
    return found


def numbers(rank: int, turn: int, rows: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * turn + rank)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64)


def at_random(seed: int) -> Costs:
    """Anything may take up to a hundred times longer than usual."""
    generator = random.Random(seed)
    return lambda kind, amount: 10 ** generator.uniform(-1, 1) * (0.1 if kind == "signal" else 1.0)


SIZES = ((2, 3, 5), (4, 6, 2), (1, 2, 3))
"""Rows of a shard, and a linear's features: changing, so that buffers alternate, are taken again, and grow."""


@pytest.mark.parametrize("limit", [None, "PIECE", "LARGE"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_operations_in_a_row_are_right_at_any_speed(
    ranks: int, limit: str | None, streams: Installs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`limit`: that size is reached by all."""
    if limit:
        monkeypatch.setattr(copy_engine, limit, 1)

    def work(engine: CopyEngine) -> list[tuple[Tensor, ...]]:
        found = []
        for turn in range(8):
            rows, k, n = SIZES[turn % 3]
            shard, weight = numbers(engine.rank, turn, rows, k), numbers(engine.rank, turn + 50, n, k)
            grad, saved = numbers(engine.rank, turn + 20, rows * ranks, n), turn % 2 == 0
            whole, product = operations.column_forward(engine, shard, weight, saved)
            kept = whole if saved else shard
            found.append((kept, product, *operations.column_backward(engine, grad, weight, kept, saved)))
            summed = operations.row_forward(engine, grad, weight.t())
            found.append((summed, *operations.row_backward(engine, shard, grad, weight.t())))
        return found

    for seed in range(6):
        streams(machine := Machine(at_random(seed)))
        found = queued(machine, ranks, work, merged=seed % 2 == 1)
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


def test_a_sum_goes_around_the_ring_to_its_owner(streams: Installs) -> None:
    """1 + 2^60 - 2^60 in fp32 is 0 from the left: only rank 0's sum begins with rank 1 and ends with its own part."""
    values = torch.tensor([1.0, 2.0**60, -(2.0**60)])

    def work(engine: CopyEngine) -> Tensor:
        return engine.matmul_scatter(values[engine.rank].expand(3, 1).contiguous(), torch.ones(1, 4))()

    streams(machine := Machine(at_random(0)))
    found = queued(machine, 3, work)
    machine.run()
    assert [float(each[0, 0]) for each in found] == [1.0, 0.0, 0.0]


ROWS, IN, OUT = 64, 16, 32
"""A row-parallel linear's tokens, and its features on a rank; a column-parallel one's the other way around."""
OPERATIONS: dict[str, Callable[[CopyEngine], Any]] = {
    "row forward": lambda engine: operations.row_forward(engine, torch.zeros(ROWS, IN), torch.zeros(OUT, IN)),
    "row backward": lambda engine: operations.row_backward(
        engine, torch.zeros(ROWS // engine.size, OUT), torch.zeros(ROWS, IN), torch.zeros(OUT, IN)
    ),
    "column forward": lambda engine: operations.column_forward(
        engine, torch.zeros(ROWS // engine.size, OUT), torch.zeros(IN, OUT), True
    ),
    "column backward": lambda engine: operations.column_backward(
        engine, torch.zeros(ROWS, IN), torch.zeros(IN, OUT), torch.zeros(ROWS, OUT), True
    ),
}


def exposed(streams: Installs, ranks: int, name: str, transfer: float) -> tuple[float, list[str]]:
    """The operation's time beyond its products, where one product of all rows takes 1 and a shard's transfer so long;
    and the kinds of what rank 0 ran on the stream of its products."""
    shard = ROWS // ranks * OUT
    costs = {"product": 1 / (ROWS * IN * OUT), "transfer": transfer / shard, "engine": transfer / shard / 40}
    streams(machine := Machine(lambda kind, amount: costs.get(kind, 0.0) * amount))
    queued(machine, ranks, OPERATIONS[name])
    products = 2.0 if name.endswith("backward") else 1.0
    took = machine.run() - products
    return took, [kind for stream, kind, _, _ in machine.log if stream is machine.streams[2]]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_large_shard_is_kept_without_a_kernel_before_its_product(
    ranks: int, streams: Installs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the one that stages it for the peers. The copy hides as the transfers do."""
    monkeypatch.setattr(copy_engine, "LARGE", 1)
    took, ran = exposed(streams, ranks, "column forward", transfer=0.5 / ranks)
    assert took == pytest.approx(0, abs=1e-6)
    assert ran == ["copy"] + ["product"] * ranks


def test_a_driver_without_such_copies_leaves_them_to_kernels(
    streams: Installs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_engine, "LARGE", 1)
    monkeypatch.setattr(Machine, "cuMemcpyBatchAsync_v2", None)
    _, ran = exposed(streams, 2, "column forward", transfer=0.25)
    assert ran == ["copy", "copy", "product", "product"]


def test_a_copy_that_the_driver_refuses_is_an_error(streams: Installs, monkeypatch: pytest.MonkeyPatch) -> None:
    streams(Machine(at_random(0)))
    monkeypatch.setattr(Machine, "cuMemcpyBatchAsync_v2", lambda *_: 1)
    with pytest.raises(RuntimeError, match="cuMemcpyBatchAsync_v2 failed with CUDA error 1"):
        copy_beside_compute(torch.zeros(4), torch.ones(4))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", OPERATIONS)
def test_transfers_that_take_half_a_product_hide(
    name: str, ranks: int, streams: Installs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one rank's rows, that is: what each transfer runs beside."""
    monkeypatch.setattr(copy_engine, "PIECE", 1)
    took, ran = exposed(streams, ranks, name, transfer=0.5 / ranks)
    assert took == pytest.approx(0, abs=1e-6)
    assert "add" not in ran and ran.count("copy") == {"column forward": 2, "row backward": 1}.get(name, 0)


def test_the_input_gradients_transfer_hides_behind_the_weights_gradient(streams: Installs) -> None:
    """However large it is, up to that product: in one piece, without a kernel of additions."""
    took, ran = exposed(streams, 2, "column backward", transfer=1.0)
    assert took == pytest.approx(0, abs=1e-6)
    assert ran == ["product"] * 3


def test_small_sums_are_added_after_the_own_product_which_hides_the_transfer(streams: Installs) -> None:
    took, ran = exposed(streams, 2, "row forward", transfer=0.5)
    assert took == pytest.approx(0, abs=1e-6)
    assert ran == ["product", "product", "add"]


def test_a_signal_that_never_comes_is_an_error_here(streams: Installs) -> None:
    streams(machine := Machine(at_random(0)))
    signals = StreamSignals([FLAG_SPACE, 2 * FLAG_SPACE], 0)
    signals.send(3, 1)
    machine.run()
    assert list(machine.flags) == [2 * FLAG_SPACE + 4 * (3 * 2 + 0)]
    signals.wait(0, 1)
    with pytest.raises(AssertionError, match="wait for each other"):
        machine.run()
    machine.cuStreamWaitValue32_v2 = lambda *_: 700  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="cuStreamWaitValue32_v2 failed with CUDA error 700"):
        signals.wait(0, 1)


@pytest.mark.parametrize(
    ("rank", "single", "merged"),
    [(0, [1, 2, 3], [[1, 2, 3]]), (1, [2, 3, 0], [[2, 3], [0]]), (3, [0, 1, 2], [[0, 1, 2]])],
)
def test_peers_follow_the_own_rank(rank: int, single: list[int], merged: list[list[int]]) -> None:
    assert [list(run) for run in peer_runs(rank, 4, merged=False)] == [[each] for each in single]
    assert [list(run) for run in peer_runs(rank, 4, merged=True)] == merged
