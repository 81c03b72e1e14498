"""The fused junction's autograd on one rank without GPUs. Several ranks: the tests of all registered variants."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tpbench.comm.parallel_linears import LocalSchedule, Schedule
from tpbench.workloads.tp_block.execution.fused_schedule import FusedSchedule


def lone_schedule(monkeypatch: pytest.MonkeyPatch) -> FusedSchedule:
    """Return the schedule of a lone rank, whose stream and symmetric buffers are the process' own."""
    stream = SimpleNamespace(wait_stream=lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    buffers: Any = SimpleNamespace(rank=0, size=1, group=None, copies=stream, barrier=lambda: None, capturing=False)
    buffers.next = lambda name, shape, dtype: [torch.full(shape, torch.nan, dtype=dtype)]
    return FusedSchedule(buffers)


def results(schedule: Schedule, keep: bool) -> list[Tensor]:
    """Return both results of a junction, and the gradients of its inputs and weights."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (6, 5), "row": (7, 5), "residual": (6, 7), "norm": (7,), "column": (4, 7)}
    drawn = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for name, shape in shapes.items()
    }
    outputs = schedule.junction(**drawn, eps=1e-5, keep=keep)
    torch.autograd.backward(outputs, [output.detach().cos() for output in outputs])
    return [*(output.detach() for output in outputs), *(each.grad for each in drawn.values() if each.grad is not None)]


@pytest.mark.parametrize("keep", [False, True])
def test_the_fused_junction_is_the_default_one(keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = results(LocalSchedule(), keep)
    assert len(expected) == 7
    torch.testing.assert_close(results(lone_schedule(monkeypatch), keep), expected, rtol=1e-9, atol=1e-9)
