"""A session of the block: verdicts of wrong results, and the details of each part."""

from __future__ import annotations

import math
from unittest import mock

import pytest

from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tests.support.tp_block import FixedStopwatch, block_context, context, problem
from tpbench.measure.stopwatch import Stopwatch
from tpbench.workloads.tp_block import WORKLOAD, bench
from tpbench.workloads.tp_block.execution.prepared import NoCommunicationSchedule, prepare
from tpbench.workloads.tp_block.limits import TOLERANCE

needs_ranks = pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs, or none")


def verdicts(here: Rank) -> list[tuple[str | None, float]]:
    """Verdicts and gradient errors of a right block, of one without communication, and of a NaN gradient on rank 1."""
    cell = problem(dtype="float32")
    with mock.patch.object(bench, "Stopwatch", lambda _: FixedStopwatch()):
        session = bench.setup(cell, WORKLOAD.variants["block_tp"], context(here))
    session.step()
    found = [session.check()]
    right = session.prepared
    session.prepared = prepare(block_context(here, cell), NoCommunicationSchedule(here.rank, here.world_size))
    session.step()
    found.append(session.check())
    session.prepared = right
    session.step()
    assert session.prepared.x.grad is not None
    if here.rank == 1:
        session.prepared.x.grad[-1] = math.nan
    found.append(session.check())
    return [(each.wrong, each.columns["grad_error"]) for each in found]


@needs_ranks
def test_the_oracle_finds_wrong_results_and_all_ranks_agree() -> None:
    first, second = run_on_ranks(2, verdicts)
    assert first == second
    (right, error), (silent, _), (lost, infinite) = first
    assert right is None and error < TOLERANCE["float32"] / 4
    assert silent is not None and "output_error" in silent and "grad_error" in silent
    assert lost is not None and "grad_error (of input) inf" in lost and infinite == math.inf


def detailed(here: Rank, name: str, part: str, real_times: bool) -> dict[str, float]:
    stopwatch = Stopwatch(context(here)) if real_times else FixedStopwatch()
    with mock.patch.object(bench, "Stopwatch", lambda _: stopwatch):
        session = bench.setup(problem(part=part, save_gathered=False), WORKLOAD.variants[name], context(here))
    session.step()
    assert session.check().wrong is None
    found = session.details({"time_ms": 3.0, "device_ms": None, "copy_gb_per_s": 1.0})
    assert session.output is None and session.prepared.x.grad is None, "details leave no result behind"
    return {name: value for name, value in found.items() if name.endswith(("_ms", "share", "hidden"))}


@needs_ranks
@pytest.mark.parametrize(
    ("name", "part", "directions"),
    [
        ("block_tp", "column", {"gather_hidden"}),
        ("block_tp_overlap", "row", {"scatter_hidden"}),
        ("block_auto", "mlp", {"gather_hidden", "scatter_hidden"}),
        ("block_no_tp", "block", None),
    ],
)
def test_details_are_about_the_communication_of_the_part(name: str, part: str, directions: set[str] | None) -> None:
    found = run_on_ranks(2, detailed, name, part, name == "block_tp")[0]
    exposure = {"compute_ms", "communication_ms", "exposed_ms", "hidden_share"}
    always = {"forward_ms", "backward_ms", "gemm_share", "timeline_ms", "timeline_start_ms"}
    assert found.keys() == always | (set() if directions is None else exposure | directions)
