"""What must never pass silently: lost rows, rows of others, wrong sums, a pinned buffer written too early."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.embedding_grad import HERE, context, prepared, problem, run
from tests.support.ranks import Rank, RankError, enough_gpus, run_on_ranks
from tpbench.workloads.embedding_grad import WORKLOAD, links
from tpbench.workloads.embedding_grad.bench import EmbeddingGradSession
from tpbench.workloads.embedding_grad.index import TouchedMask
from tpbench.workloads.embedding_grad.inputs import Inputs
from tpbench.workloads.embedding_grad.links import Links
from tpbench.workloads.embedding_grad.oracle import LostRows
from tpbench.workloads.embedding_grad.pinned import PinnedRing
from tpbench.workloads.embedding_grad.wire import Wire

needs_ranks = pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs, or none")


def forgetful(here: Rank, name: str) -> list[str]:
    """Rank 1's backward pass touched a row that its mask was not told of."""
    said = []
    for lost in (3, 90):  # of rank 0, and its own
        inputs = Inputs(problem(distribution="none"), context(here))
        if here.rank == 1:
            inputs.grad[lost] = 1.0
        session = EmbeddingGradSession(inputs.problem, WORKLOAD.variants[name], context(here), inputs)
        session.step()
        try:
            session.check()
        except LostRows as error:
            said.append(str(error))
    return said


@needs_ranks
@pytest.mark.parametrize("name", sorted({"sparse_all_to_all", "sparse_all_gather", "sparse_symmetric"} & set(HERE)))
def test_a_row_outside_the_mask_is_an_error_on_every_rank(name: str) -> None:
    for said in run_on_ranks(2, forgetful, name):
        assert said == [f"rank 1 has 1 touched rows outside the mask, the first is row {row}" for row in (3, 90)]


def spoiled(here: Rank) -> Any:
    """Rank 0's result has a wrong row."""
    session = EmbeddingGradSession(problem(), WORKLOAD.variants["sparse_all_to_all"], context(here))
    session.step()
    if here.rank == 0:
        session.exchange.result()[5] += 1.0
    return session.check()


def miscounted(here: Rank) -> Any:
    """Rank 0 sent 8 bytes more than it should."""
    session = EmbeddingGradSession(problem(), WORKLOAD.variants["sparse_all_to_all"], context(here))
    session.step()
    session.wire.to_peer[1] += 8 * (here.rank == 0)
    return session.check()


@needs_ranks
def test_what_is_wrong_is_wrong_on_every_rank() -> None:
    for verdict in run_on_ranks(2, spoiled):
        assert "grad_error" in verdict.wrong
    for verdict in run_on_ranks(2, miscounted):
        assert "by the formula" in verdict.wrong


def sends_itself(here: Rank) -> None:
    wire = Wire(here.group, here.rank, here.world_size)
    wire.all_to_all(torch.empty(2, 3), torch.zeros(2, 3), [1, 1], [1, 1])


def after_a_hiccup(here: Rank) -> tuple[Links, float]:
    """The links, where the first series of the stopwatch takes ten times as long as it should; the right latency."""
    inputs = Inputs(problem(), context(here))
    taken = iter([0.1, *itertools.repeat(0.01, 10)])

    class Hiccup:
        def ms(self, run: Any, restore: Any = None, *, on_host: bool = False) -> float:
            run()
            return next(taken)

    stopwatch: Any = Hiccup()
    return links.measure(inputs, Wire(here.group, here.rank, here.world_size), stopwatch), 0.01


@needs_ranks
def test_a_hiccup_is_not_the_latency() -> None:
    for found, latency_ms in run_on_ranks(2, after_a_hiccup):
        assert found.latency_ms == latency_ms


def foretold(here: Rank) -> list[tuple[dict[str, Any], float]]:
    """A row's links, and the crossover that it predicts, on two machines, one with a slower all-to-all."""
    found = []
    for slower in (1, 2):
        session = EmbeddingGradSession(problem(), WORKLOAD.variants["sparse_all_to_all"], context(here))
        session.links = Links(90.0 / slower, 50.0 + 10 * slower, 1e-6 * slower, 40.0 / slower)
        session.step()
        columns = {**session.check().columns, "copy_gb_per_s": 300.0 + 100 * slower, "time_ms": 1.0}
        found.append((columns, session.details(columns)["predicted_crossover"]))
    return found


@needs_ranks
def test_the_crossover_is_predicted_from_the_rows_own_links() -> None:
    for said in run_on_ranks(2, foretold):
        for row, predicted in said:
            byte = (1 + 4 / 24) / row["all_to_all_gb_per_s"] + 5 / row["copy_gb_per_s"]
            byte += 4 / 24 * 2 / row["upload_gb_per_s"]
            waiting = 5 * row["latency_ms"] * 1e6 / (101 * 24 / 2)
            assert predicted == pytest.approx((1 / row["reduce_scatter_gb_per_s"] - waiting) / byte)
        assert 0 < said[1][1] < said[0][1] < 1


@needs_ranks
def test_own_rows_cannot_be_sent() -> None:
    with pytest.raises(RankError, match="would send itself 1 rows"):
        run_on_ranks(2, sends_itself)


def misled(here: Rank, merge: str) -> str:
    """Rank 0 takes its rows for rank 1's."""
    _, wire, exchange = prepared(here, problem(merge=merge, distribution="fixed"), "sparse_all_to_all")
    index: Any = exchange.index  # type: ignore[attr-defined]
    find = index.find

    def shifted() -> Any:
        found = find()
        if here.rank == 0:
            found.rows[: found.counts[1]] = 2
        return found

    index.find = shifted
    try:
        run(exchange, wire)
    except (RuntimeError, IndexError) as error:
        return type(error).__name__
    return "right"


@needs_ranks
@pytest.mark.parametrize("merge", ["triton", "index_add"])
def test_rows_of_others_are_an_error(merge: str) -> None:
    if merge == "index_add" and torch.cuda.is_available():
        pytest.skip("there it ends the process's CUDA context")
    first, second = run_on_ranks(2, misled, merge)
    assert first == "right" and second in ("MisplacedRow", "IndexError", "RuntimeError")


@pytest.mark.parametrize("row", [-1, 7])
def test_rows_outside_the_table_are_an_error(row: int) -> None:
    with pytest.raises(IndexError):
        TouchedMask(7).add(np.array([0, row], dtype=np.int32))


def test_the_mask_begins_anew_after_it_was_taken() -> None:
    mask = TouchedMask(9)
    mask.add(np.array([5, 1, 5], dtype=np.int32))
    mask.add(np.array([8, 1], dtype=np.int32))
    assert mask.take().tolist() == [1, 5, 8]
    assert mask.take().tolist() == []


class LateCopies:
    """A device that copies only when somebody waits for it, as one far behind the host does."""

    def __init__(self) -> None:
        self.pending: list[Any] = []
        self.waits = 0

    def __call__(self, filled: torch.Tensor) -> tuple[torch.Tensor, Any]:
        moved = torch.full_like(filled, -1)
        self.pending.append((filled, moved))
        return moved, self._Event(self, len(self.pending))

    class _Event:
        def __init__(self, device: LateCopies, count: int) -> None:
            self.device, self.count = device, count

        def synchronize(self) -> None:
            """All copies up to this one."""
            self.device.waits += 1
            for filled, moved in self.device.pending[: self.count]:
                if (moved == -1).all():
                    moved.copy_(filled)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_pinned_buffer_is_not_written_before_its_copy_ended(slots: int) -> None:
    device = LateCopies()
    ring = PinnedRing(4, device, pinned=False, slots=slots)
    sent = [ring.send([np.array([step, step + 1], dtype=np.int32), np.array([7], dtype=np.int32)]) for step in range(6)]
    assert device.waits == 6 - slots  # and no sooner than must be
    ring.ends[ring.turn].synchronize()  # type: ignore[union-attr]
    assert [each.tolist() for each in sent] == [[step, step + 1, 7] for step in range(6)]
