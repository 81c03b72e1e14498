"""Transfers beside the stand-in, with real exchanges and on a real GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.embedding_grad import HERE, FixedStopwatch, new_session, prepared, problem
from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tpbench.workloads.embedding_grad.exchanges.base import Phase
from tpbench.workloads.embedding_grad.training_step.overlap import FORWARD, OverlappedIteration, StandIn

needs_ranks = pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs, or none")


def points_of(here: Rank, name: str) -> dict[str, str]:
    exchange = prepared(here, problem(merge="index_add"), name)[2]
    return {phase.name: phase.after for phase in exchange.phases}


@needs_ranks
@pytest.mark.parametrize("name", sorted({"sparse_all_to_all", "sparse_all_gather", "sparse_auto"} & set(HERE)))
def test_an_exchange_uses_all_three_points(name: str) -> None:
    for points in run_on_ranks(2, points_of, name):
        assert points.pop("counts") == "batch" and points.pop("ids") == "forward"
        assert set(points.values()) == {"backward"}


def overlapped(here: Rank, transfers: str) -> tuple[float, float, dict[str, Any]]:
    """Return the requested length of the stand-in, an iteration's wall time in ms, and the row's columns."""
    # Beside other users of a GPU a short stand-in is calibrated badly.
    overlap_ms = 20.0 if torch.cuda.is_available() else 5.0
    cell = problem(overlap_ms=overlap_ms, transfers=transfers, merge="index_add")
    session = new_session(here, cell, "sparse_all_to_all")
    wall_ms = session.stopwatch.ms(session.step, session.restore, on_host=True)
    columns = session.check().columns
    details = session.details({**columns, "copy_gb_per_s": 10.0, "time_ms": wall_ms})
    return cell.overlap_ms, wall_ms, {**columns, **details}


@needs_ranks
@pytest.mark.parametrize("transfers", ["early", "late", "beside"])
def test_an_iteration_has_the_whole_stand_in(transfers: str) -> None:
    for overlap_ms, wall_ms, columns in run_on_ranks(2, overlapped, transfers):
        # On a GPU the stand-in consists of whole products.
        least = (1 + FORWARD) * overlap_ms * (0.9 if torch.cuda.is_available() else 1.0)
        assert columns["stand_in_ms"] >= least
        assert wall_ms >= least
        assert columns["exposed_ms"] == pytest.approx(wall_ms - columns["stand_in_ms"])


def among_others(here: Rank) -> tuple[dict[str, Any], str | None]:
    """Return a row's columns with an index and other parameters, and the verdict after one rank has a wrong index."""
    cell = problem(
        distribution="zipf_bigram", index="early", overlap_ms=5.0, other_mib=0.01, other_count=2, merge="index_add"
    )
    session = new_session(here, cell, "sparse_all_to_all")
    session.step()
    verdict = session.check()
    assert verdict.wrong is None, verdict
    details = session.details({**verdict.columns, "copy_gb_per_s": 10.0, "time_ms": 20.0})
    session.restore()
    session.step()
    if here.rank == 1:
        assert session.index is not None and session.index.rows is not None
        session.index.rows[0, 3] += 1
    return details, session.check().wrong


@needs_ranks
def test_other_transfers_are_not_the_exchanges_time_and_a_wrong_index_is_wrong() -> None:
    for columns, wrong in run_on_ranks(2, among_others):
        assert columns["others_ms"] >= (1 + FORWARD) * 5.0 * (0.9 if torch.cuda.is_available() else 1.0)
        assert columns["exposed_ms"] == pytest.approx(20.0 - columns["others_ms"])
        assert columns["index_ms"] > 0
        assert wrong == "1 rows of the forward pass's index are wrong"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("transfers", ["early", "late", "beside"])
def test_on_a_gpu_late_is_late_for_the_host_too(transfers: str) -> None:
    device = torch.device("cuda")
    stopwatch: Any = FixedStopwatch()
    stand_in: Any = StandIn(20.0, device, stopwatch)  # 2000 products: about 20 ms or more
    compute = torch.cuda.current_stream(device)
    passed: dict[str, bool] = {}
    backward_ends: list[torch.cuda.Event] = []
    backward = stand_in.backward

    def recorded_backward() -> None:
        backward()
        backward_ends.append(compute.record_event())

    stand_in.backward = recorded_backward

    def phase(name: str, **more: Any) -> Phase:
        return Phase(name, lambda: passed.update({name: backward_ends[-1].query()}), **more)

    phases = [phase("counts", after="batch"), phase("ids", after="forward"), phase("values")]
    iteration = OverlappedIteration(phases, transfers, stand_in, device)
    for _ in range(2):  # the first iteration loads kernels
        iteration.run()
        torch.cuda.synchronize(device)
    late = transfers == "late"
    assert passed == {"counts": late, "ids": late, "values": late}
    # A phase that needs the gradient is queued ahead, as under transfers=early.
    OverlappedIteration([phase("reduce")], transfers, stand_in, device).run()
    assert not passed["reduce"]
