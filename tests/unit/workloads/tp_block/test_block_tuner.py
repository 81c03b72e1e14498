"""The choice between whole steps by both clocks, and a block's passes as graphs without a GPU."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tpbench.workloads.tp_block.execution.autotune import (
    PLAIN,
    Candidate,
    ScheduleTuner,
    StepTimes,
    best_step,
    fastest,
)
from tpbench.workloads.tp_block.execution.prepared import WARMUP_PASSES, GraphedBlock

EAGER, GRAPHS = Candidate(PLAIN), Candidate(PLAIN, graphs=True)
OVERLAP, OVERLAP_GRAPHS = Candidate("copy_engine"), Candidate("copy_engine", graphs=True)


def test_the_plain_schedule_is_kept_unless_another_is_clearly_faster() -> None:
    assert fastest({"plain": 1.0, "ring": 0.995, "copy_engine": 1.2}) == "plain"
    assert fastest({"plain": 1.0, "ring": 0.985, "copy_engine": 0.9}) == "copy_engine"


@pytest.mark.parametrize(
    ("times", "best"),
    [
        # Less device time, but more wall time: a choice by the device clock would lose.
        ({EAGER: (4.68, 2.80), OVERLAP: (6.84, 2.49)}, EAGER),
        # The graph of the overlapped step wins by both clocks, that of the plain step only by wall time.
        ({EAGER: (4.68, 2.8), OVERLAP: (6.84, 2.5), GRAPHS: (2.9, 2.8), OVERLAP_GRAPHS: (2.6, 2.6)}, OVERLAP_GRAPHS),
        # Less wall time at more device time is no gain for who is bound by the device.
        ({EAGER: (4.68, 2.80), GRAPHS: (2.86, 2.85)}, EAGER),
        # Equal wall times: the device time decides.
        ({EAGER: (12.3, 11.2), OVERLAP: (12.3, 10.2)}, OVERLAP),
        # A gain below the noise is none.
        ({EAGER: (12.3, 11.2), OVERLAP: (12.25, 11.15)}, EAGER),
        ({EAGER: (12.3, 11.2), OVERLAP: (11.9, 10.2), GRAPHS: (12.0, 9.0)}, OVERLAP),
    ],
)  # fmt: skip
def test_a_step_is_chosen_only_if_it_loses_by_no_clock(
    times: dict[Candidate, tuple[float, float]], best: Candidate
) -> None:
    assert best_step({candidate: StepTimes(*both) for candidate, both in times.items()}) == best


def test_under_a_graph_the_plain_step_is_a_graph_too() -> None:
    times = {GRAPHS: StepTimes(2.86, 2.81), OVERLAP_GRAPHS: StepTimes(2.85, 2.80)}
    assert best_step(times, plain=GRAPHS) == GRAPHS
    assert best_step(times | {OVERLAP_GRAPHS: StepTimes(2.58, 2.60)}, plain=GRAPHS) == OVERLAP_GRAPHS


class TwoClocks:
    """A stopwatch by which each step takes 7 ms on the host and 4 ms on the device."""

    def interleaved_ms(self, *timed: Any, most: int, on_host: bool = False) -> list[list[float]]:
        return [[7.0 if on_host else 4.0] * 3 for _ in timed]


@pytest.mark.parametrize(
    ("device", "graph", "expected"),
    [("cuda", False, StepTimes(7.0, 4.0)), ("cuda", True, StepTimes(4.0, 4.0)), ("cpu", False, StepTimes(4.0, 4.0))],
)
def test_whole_steps_are_timed_by_both_clocks_where_the_host_counts(
    device: str, graph: bool, expected: StepTimes
) -> None:
    tuner = ScheduleTuner.__new__(ScheduleTuner)
    inputs: Any = SimpleNamespace(device=SimpleNamespace(type=device))
    context: Any = SimpleNamespace(inputs=inputs, graph=graph, stopwatch=TwoClocks())
    tuner.context, nothing = context, SimpleNamespace()
    candidates: Any = {EAGER: nothing, OVERLAP: nothing}
    assert tuner._times(candidates) == {EAGER: expected, OVERLAP: expected}


class CountedGraph:
    """A CUDA graph that only counts its replays."""

    replays = 0

    def replay(self) -> None:
        self.replays += 1


class CountedModule(torch.nn.Linear):
    """A module that counts its calls."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


def test_a_call_replays_graphs_and_copies_only_foreign_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes: dict[str, Any] = {
        "CUDAGraph": CountedGraph,
        "Stream": lambda: None,
        "graph": lambda graph, pool: contextlib.nullcontext(),
        "graph_pool_handle": lambda: (0, 1),
        "is_current_stream_capturing": lambda: False,
        "memory_reserved": lambda: 0,
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": lambda: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    module, x, grad = CountedModule(3, 2), torch.randn(4, 3, requires_grad=True), torch.randn(4, 2)
    block: Any = SimpleNamespace(module=module, x=x, grad=grad)
    graphs = GraphedBlock(block)
    assert module.calls == WARMUP_PASSES + 1
    expected = torch.autograd.grad(module(x), (x, module.weight, module.bias), grad)
    versions = x._version, grad._version
    output = graphs(x)
    torch.testing.assert_close(output, module(x))
    output.backward(grad)
    torch.testing.assert_close((x.grad, module.weight.grad, module.bias.grad), expected)
    assert (graphs.forward.replays, graphs.backward.replays) == (1, 1)
    assert (x._version, grad._version) == versions, "the block's own tensors are not copied"
    other, upstream = torch.randn(4, 3, requires_grad=True), torch.randn(4, 2)
    graphs(other).backward(upstream)
    assert torch.equal(x, other) and torch.equal(grad, upstream)
    calls = module.calls
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    graphs(x)
    assert module.calls == calls + 1 and graphs.forward.replays == 2, "a captured iteration holds no graph of its own"
