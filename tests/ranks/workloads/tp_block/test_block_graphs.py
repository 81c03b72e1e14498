"""CUDA graphs of the block: whole iterations, both passes alone, and training steps of a stack."""

from dataclasses import replace

import pytest
import torch

from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tests.support.sleeping_sessions import run
from tests.support.tp_block import HERE, QUACK, block_context, context, largest_error, problem
from tpbench.measure.session import MeasureSettings, Session
from tpbench.workloads.tp_block import WORKLOAD
from tpbench.workloads.tp_block.execution.prepared import graphed
from tpbench.workloads.tp_block.problem import TOLERANCE

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available() or not enough_gpus(2), reason="needs 2 GPUs"),
]
SETTINGS = MeasureSettings(time_budget_s=0.1, graph=True)


def verdict(here: Rank, name: str, layers: int) -> tuple[str | None, bool]:
    """Why a replayed iteration is wrong, or None; and whether the row says that a graph was timed."""
    sizes = QUACK if name == "block_quack" else {"dtype": "bfloat16", "tokens": 64}
    cell = problem(**sizes, signals="kernel")
    if layers:
        cell = replace(cell, layers=layers, rotary=True, steps=4, warmup_steps=2)
    where = replace(context(here), graph=True)

    def set_up() -> Session:
        return WORKLOAD.set_up(cell, WORKLOAD.variants[name], where)

    # A session whose graph was captured twice holds the output of the second graph only.
    found, columns = run(set_up(), where, SETTINGS, again=set_up)
    return found.wrong, columns["graph"]


@pytest.mark.parametrize("layers", [0, 2])
@pytest.mark.parametrize("name", HERE)
def test_a_replayed_iteration_is_right(name: str, layers: int) -> None:
    assert run_on_ranks(2, verdict, name, layers) == [(None, True)] * 2


def errors_of_graphs(here: Rank) -> dict[str, float]:
    """The largest error of three steps, by schedule, with both passes as graphs."""
    cell = problem(dtype="float32", tokens=64)
    where = block_context(here, cell)
    found = {}
    for name in HERE:
        if name != "block_quack":  # its tiles need other sizes
            prepared = graphed(WORKLOAD.variants[name].prepare(cell, where))
            found[name] = max(largest_error(cell, where, prepared) for _ in range(3))
    return found


def test_passes_as_graphs_are_right_of_every_variant() -> None:
    for errors in run_on_ranks(2, errors_of_graphs):
        assert "block_copy_engine" in errors and max(errors.values()) <= TOLERANCE["float32"], errors
