"""The trace of one step on real ranks."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tests.support.tp_block import block_context, context, problem
from tpbench.measure.gpu_profiler import COMMUNICATION, PRODUCT
from tpbench.workloads.tp_block import WORKLOAD
from tpbench.workloads.tp_block.execution import measurements


def traced(here: Rank, folder: Path, keep: bool, stays: bool = False) -> dict[str, Any]:
    cell = problem(part="mlp")
    prepared = WORKLOAD.variants["block_tp"].prepare(cell, block_context(here, cell))
    where = replace(context(here), folder=folder, process_stays=stays)
    return measurements.trace_step(lambda: prepared.run(prepared.x).backward(prepared.grad), where, keep=keep)


@pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs, or none")
def test_a_step_is_traced_and_kept(tmp_path: Path) -> None:
    first, second = run_on_ranks(2, traced, tmp_path, True)
    kinds = first["timeline_kind"]
    assert kinds.count(PRODUCT) >= 6 and kinds.count(COMMUNICATION) >= 4
    assert len({len(values) for name, values in first.items() if name.startswith("timeline")}) == 1
    assert first["timeline_start_ms"] == sorted(first["timeline_start_ms"]) and min(first["timeline_ms"]) >= 0
    kept = sorted(tmp_path.iterdir())
    assert [file.name for file in kept] == ["trace_rank0.json.gz", "trace_rank1.json.gz"]
    with gzip.open(kept[1]) as file:
        assert json.load(file)["traceEvents"]
    first, second = run_on_ranks(2, traced, tmp_path / "nowhere", False)
    assert first and not second
    assert run_on_ranks(2, traced, tmp_path / "nowhere", False, True) == [{}, {}]  # a profiler would slow the next job
