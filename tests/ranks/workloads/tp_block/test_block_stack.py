"""A stack of blocks that is trained: every variant has the losses and gradient norms of the oracle."""

import re
from typing import Any
from unittest import mock

import pytest

from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tests.support.sleeping_sessions import run
from tests.support.tp_block import HERE, FixedStopwatch, block_context, context, problem
from tpbench.measure.session import MeasureSettings
from tpbench.workloads.tp_block import WORKLOAD, bench
from tpbench.workloads.tp_block.execution.prepared import NoCommunicationSchedule, prepare
from tpbench.workloads.tp_block.problem import TOLERANCE

STACK = {"layers": 2, "rotary": True, "steps": 4, "warmup_steps": 2}


def measured(here: Rank, name: str, dtype: str, broken: bool = False) -> dict[str, Any]:
    """The columns of a variant's row, or those of a stack without communication."""
    cell, where = problem(**STACK, dtype=dtype), context(here)
    with mock.patch.object(bench, "Stopwatch", lambda _: FixedStopwatch()):
        session: Any = WORKLOAD.set_up(cell, WORKLOAD.variants[name], where)
    if broken:
        session.prepared = prepare(block_context(here, cell), NoCommunicationSchedule(here.rank, here.world_size))
    verdict, columns = run(session, where, MeasureSettings())
    return {**verdict.columns, **columns, "wrong": verdict.wrong}


def every_variant(here: Rank) -> dict[tuple[str, str], dict[str, Any]]:
    cells = [(name, "float64") for name in HERE if name not in ("block_compile_async", "block_quack")] + [
        ("block_tp", "bfloat16")
    ]
    return {(name, dtype): measured(here, name, dtype) for name, dtype in cells}


@pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs, or none")
def test_every_variant_trains_as_one_process_does() -> None:
    first, second = run_on_ranks(2, every_variant)
    right = first["block_no_tp", "float64"]
    for (name, dtype), row in first.items():
        assert row["wrong"] is None and max(row["loss_error"], row["grad_error"]) <= TOLERANCE[dtype], name
        assert row["losses"] == pytest.approx(right["losses"], rel=TOLERANCE[dtype])
        assert row["grad_norms"] == pytest.approx(right["grad_norms"], rel=TOLERANCE[dtype])
        assert second[name, dtype]["losses"] == row["losses"], "all ranks have the same losses"
        assert len(row["losses"]) == 6 and len(row["samples_ms"]) == 4, "warm-up steps train, too, but have no time"
    assert right["losses"] == sorted(right["losses"], reverse=True), "training lowers the loss"


@pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs, or none")
def test_a_stack_without_its_communication_is_wrong() -> None:
    for row in run_on_ranks(2, measured, "block_tp", "float64", True):
        assert "loss_error" in str(row["wrong"]) and "time_ms" not in row
        assert re.search(r"\(float64\): all ranks: the loss of step 1 is [\d.]+, expected [\d.]+$", str(row["wrong"]))
