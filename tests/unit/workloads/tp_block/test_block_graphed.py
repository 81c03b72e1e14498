"""The forward and the backward pass as graphs, without a GPU: a capture runs the pass, and a replay is counted."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tpbench.workloads.tp_block.execution.prepared import WARMUP_PASSES, GraphedBlock


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


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Replace CUDA's graphs. The list's last value says whether a stream is being captured."""
    state = [False]
    fakes: dict[str, Any] = {
        "CUDAGraph": CountedGraph,
        "Stream": lambda: None,
        "graph": lambda graph, pool: contextlib.nullcontext(),
        "graph_pool_handle": lambda: (0, 1),
        "is_current_stream_capturing": lambda: state[-1],
        "memory_reserved": lambda: 0,
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": lambda: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return state


def test_a_call_replays_and_copies_only_foreign_tensors(capturing: list[bool]) -> None:
    torch.manual_seed(0)
    module, x, grad = CountedModule(3, 2), torch.randn(4, 3, requires_grad=True), torch.randn(4, 2)
    block: Any = SimpleNamespace(module=module, x=x, grad=grad)
    graphs = GraphedBlock(block)
    assert module.calls == WARMUP_PASSES + 1
    expected = torch.autograd.grad(module(x), (x, module.weight, module.bias), grad)
    versions = x._version, grad._version
    for replays in (1, 2):
        output = graphs(x)
        torch.testing.assert_close(output, module(x))
        output.backward(grad)
        torch.testing.assert_close((x.grad, module.weight.grad, module.bias.grad), expected)
        x.grad = module.weight.grad = module.bias.grad = None
        assert (graphs.forward.replays, graphs.backward.replays) == (replays, replays)
    assert (x._version, grad._version) == versions, "the block's own tensors are not copied"
    other, upstream = torch.randn(4, 3, requires_grad=True), torch.randn(4, 2)
    graphs(other).backward(upstream)
    assert torch.equal(x, other) and torch.equal(grad, upstream)
    calls = module.calls
    capturing.append(True)
    graphs(x)
    assert module.calls == calls + 1 and graphs.forward.replays == 3, "a captured iteration holds no graph of its own"
