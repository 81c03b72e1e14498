"""A session of the block: the figures of a row from preset times, and both passes as graphs."""

from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tests.support.tp_block import FixedStopwatch, context, problem, run_once
from tpbench.comm.parallel_linears import LocalSchedule
from tpbench.measure import cuda_graph
from tpbench.measure.rates import SHARD_BYTES, SIDE
from tpbench.measure.timers import do_nothing
from tpbench.workloads.tp_block import WORKLOAD, bench
from tpbench.workloads.tp_block.execution.prepared import BlockContext, graphed, prepare
from tpbench.workloads.tp_block.inputs import BlockInputs

needs_ranks = pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs, or none")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def session_of(here: Rank, cell: Any, name: str, stopwatch: Any) -> Any:
    with mock.patch.object(bench, "Stopwatch", lambda _: stopwatch):
        session: Any = WORKLOAD.set_up(cell, WORKLOAD.variants[name], context(here))
    session.step()
    return session


class PresetStopwatch:
    """A stopwatch with preset times, in the order in which a session asks for them."""

    def __init__(self, *times: Any) -> None:
        self.times = list(times)

    def ms(self, run: Any, restore: Any = do_nothing) -> float:
        restore()
        run()
        return float(self.times.pop(0))

    def interleaved_ms(self, *timed: Any, **_: Any) -> list[list[float]]:
        for run, restore in timed:
            restore()
            run()
        return list(self.times.pop(0))

    chained_ms = interleaved_ms


PRODUCT_MS, LARGE_GATHER_MS = 0.5, 0.25
"""Times of the product and the all-gather that the machine's rates are measured with."""
# The median of the differences is never the difference of the medians.
IN_LOOP = [[10.0, 12.0, 14.0], [8.0, 9.0, 13.0]]
PAIRS = [[10.0, 12.0, 14.0], [7.0, 8.0, 13.0]]
FORWARD = [[[4.0, 5.0, 6.0], [1.0, 2.0, 5.5]], [[4.0, 5.0, 6.0], [3.5, 4.0, 4.5]]]
STEP = [3.0, 5.0, PAIRS, IN_LOOP, *FORWARD, 4.0]
"""Forward, backward, the step with and without communication, alone and in a loop, its forward pass in the same ways,
and its collectives."""
FLOPS = 3 * (2 * 32 * (24 * 48 + 24 * 24 + 24 * 40 + 20 * 24) + 2 * 32**2 * 24)
"""A rank's FLOPs: weights of q, k and v; of out; of gate and up; of down; and half of attention's square."""


def figures(here: Rank) -> dict[str, float]:
    """Return the figures of a block that gathers its inputs again."""
    stopwatch = PresetStopwatch(PRODUCT_MS, LARGE_GATHER_MS, *STEP)
    session = session_of(here, problem(save_gathered=False), "block_tp", stopwatch)
    found = {**session.check().columns, **session.details({"time_ms": 6.0, "device_ms": 4.0})}
    assert not stopwatch.times
    assert session.output is None and session.prepared.x.grad is None, "details leave no result behind"
    return found | {"floor's compute_ms": session.costs.compute_ms, "wire_ms": session.costs.wire_ms}


@needs_ranks
def test_every_figure_has_the_right_value() -> None:
    gemm = 2 * SIDE[DEVICE] ** 3 / PRODUCT_MS / 1e9
    bandwidth = SHARD_BYTES[DEVICE] / LARGE_GATHER_MS / 1e6
    expected = {
        "forward_ms": 3.0,
        "backward_ms": 5.0,
        "compute_ms": 8.0,
        "communication_ms": 4.0,
        "exposed_ms": 3.0,
        "chained_compute_ms": 9.0,
        "chained_exposed_ms": 2.0,
        "forward_compute_ms": 2.0,
        "forward_exposed_ms": 3.0,
        "chained_forward_compute_ms": 4.0,
        "chained_forward_exposed_ms": 1.0,
        "hidden_share": 1 - 3.0 / 4.0,
        "gemm_tflops": gemm,
        "tflops": FLOPS / 4.0 / 1e9,
        "gemm_share": FLOPS / 4.0 / 1e9 / gemm,
        "gather_gb_per_s": bandwidth,
        "floor's compute_ms": FLOPS / gemm / 1e9,
        # A rank sends half of 8 matrices and of the sums of 2 norms. Gathering again is avoidable and does not count.
        "wire_ms": (8 * 32 + 2 * 2) * 24 * 8 // 2 / bandwidth / 1e6,
    }
    for found in run_on_ranks(2, figures):
        assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-12)


def test_both_passes_as_graphs_leave_the_gradients_of_an_eager_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture without a GPU computes once, and a replay keeps its tensors."""
    monkeypatch.setattr(cuda_graph, "warm_up", lambda work: work())
    monkeypatch.setattr(cuda_graph, "capture", lambda work, pool: cuda_graph.CapturedWork(work(), do_nothing))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    cell, stopwatch = problem(), FixedStopwatch()
    eager = prepare(BlockContext(BlockInputs(cell, context()), stopwatch), LocalSchedule())  # type: ignore[arg-type]
    expected, graphs = run_once(cell, eager).named(), graphed(eager)
    for _ in range(2):
        found = run_once(cell, graphs).named()
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
