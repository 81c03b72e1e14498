"""graph=true: a step as the replay of a CUDA graph trains as an eager step does."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tests.support.sleeping_sessions import run as measure
from tests.support.train_step import mesh_context, tiny_problem
from tpbench.measure import cuda_graph
from tpbench.measure.session import MeasureSettings
from tpbench.workloads.train_step import WORKLOAD
from tpbench.workloads.train_step.bench import TrainStepSession

pytestmark = pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs, or none")


def run_again(
    step: Callable[[], tuple[torch.Tensor, torch.Tensor]], stream: Any
) -> cuda_graph.CapturedWork[tuple[torch.Tensor, torch.Tensor]]:
    """Imitate a capture on a machine without GPUs: it trains nothing. Each replay runs the step on the tensors of the
    capture and overwrites its results."""
    results = torch.full((), torch.nan), torch.full((), torch.nan)

    def replay() -> None:
        for result, new in zip(results, step(), strict=True):
            result.copy_(new)

    return cuda_graph.CapturedWork(results, replay)


def trained(here: Rank, fields: dict[str, Any], graph: bool) -> dict[str, Any]:
    problem = tiny_problem(steps=4, log_interval=0, **fields)
    context = replace(mesh_context(here, 2), graph=graph)
    cuda = here.device.type == "cuda"
    with contextlib.ExitStack() as patches:
        if not cuda:
            patches.enter_context(mock.patch.object(cuda_graph, "capture", run_again))
        session = TrainStepSession(problem, WORKLOAD.variants["fsdp_dtensor"], context)
        verdict, columns = measure(session, context, MeasureSettings())
    assert verdict.wrong is None
    return columns | verdict.columns


def test_replays_train_on_new_batches_as_eager_steps_do() -> None:
    fields = {"accumulate": 2, "activation_checkpointing": True}
    eager = run_on_ranks(2, trained, fields, False)[0]
    replayed = run_on_ranks(2, trained, fields, True)[0]
    assert (eager["graph"], replayed["graph"]) == (False, True)
    assert len(set(replayed["losses"])) == len(replayed["losses"]) == 5 + 4
    assert replayed["losses"] == pytest.approx(eager["losses"], rel=1e-6)
    assert replayed["grad_norms"] == pytest.approx(eager["grad_norms"], rel=1e-5)
