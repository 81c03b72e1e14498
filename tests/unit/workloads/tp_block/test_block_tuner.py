"""The choice of block_auto between the times of whole steps, and what it tries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from tests.support.tp_block import FixedStopwatch, context, problem
from tpbench.workloads.tp_block.execution.autotune import Candidate, available, best_step
from tpbench.workloads.tp_block.execution.prepared import BlockContext
from tpbench.workloads.tp_block.inputs import BlockInputs
from tpbench.workloads.tp_block.workload import PLAIN

EAGER, GRAPHS, OVERLAP = Candidate(PLAIN), Candidate(PLAIN, graphs=True), Candidate("block_copy_engine")
DRIFT = [4.0, 4.1, 4.2, 4.1, 4.3, 4.4, 4.2, 4.3, 4.5, 4.4]
NOISE = [0.0, 0.04, -0.04, 0.02, 0.03, -0.03, 0.0, -0.04, 0.04, -0.03]


def beside(difference: float) -> list[float]:
    """Times that differ by so much from those of a plain step that becomes slower, and by noise."""
    return [step + difference + noise for step, noise in zip(DRIFT, NOISE, strict=True)]


@pytest.mark.parametrize(
    ("times", "best"),
    [
        ({EAGER: DRIFT, OVERLAP: beside(-0.2)}, OVERLAP),  # less than the drift, but in each pair
        ({EAGER: DRIFT, OVERLAP: beside(-0.01)}, EAGER),
        ({EAGER: DRIFT, OVERLAP: beside(0.2)}, EAGER),
        ({EAGER: beside(1.0), GRAPHS: DRIFT, OVERLAP: beside(-0.01)}, GRAPHS),
        ({EAGER: [4.0] * 5, OVERLAP: [3.0] * 5}, EAGER),  # too few for an interval
    ],
)
def test_the_fastest_step_is_chosen_or_a_simpler_one_that_ties(
    times: dict[Candidate, list[float]], best: Candidate
) -> None:
    assert best_step(times) == best


@pytest.mark.parametrize(("fields", "names"), [({}, ["block_tp", "block_tp_overlap"]), ({"tokens": 36}, ["block_tp"])])
def test_every_variant_that_can_run_here_is_tried(fields: dict[str, int], names: list[str]) -> None:
    four_ranks, stopwatch = replace(context(), tp_size=4, device=torch.device("cpu")), cast(Any, FixedStopwatch())
    assert [*available(BlockContext(BlockInputs(problem(**fields), four_ranks), stopwatch))] == names


def test_variants_on_gpus_are_tried_but_the_whole_block_and_the_choice_itself() -> None:
    two_ranks, stopwatch = replace(context(), tp_size=2, device=torch.device("cuda")), cast(Any, FixedStopwatch())
    names = [*available(BlockContext(BlockInputs(problem(), two_ranks), stopwatch))]
    assert names[0] == PLAIN and {"block_symm_mem", "block_copy_engine", "block_fused"} <= {*names}
    assert {"block_auto", "block_no_tp"}.isdisjoint(names)
