"""The forward and the backward pass of a block as two CUDA graphs, behind the module's usual call."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tpbench.workloads.tp_block.execution.prepared import PreparedBlock

WARMUP_PASSES = 3
"""Passes before a capture: they allocate shared memory and choose kernels."""


class GraphedBlock:
    """Calls a block through two CUDA graphs: the host launches two graphs and no kernels.

    torch's `make_graphed_callables` does the same, but always copies the upstream gradient. Here the graphs read the
    block's own x and upstream gradient, and only other tensors are copied.

    Gradients lie in memory of the graphs, which the next backward pass overwrites: use and free them before. While a
    stream is captured, the block is called without its own graphs.
    """

    def __init__(self, prepared: PreparedBlock, pool: Any = None) -> None:
        """Capture both passes. Collective. Graphs that share a `pool` must not run one within the other."""
        self.module, self.x, self.grad = prepared.module, prepared.x, prepared.grad
        self.parameters = tuple(prepared.module.parameters())
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        pool = pool or torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
        with graph_memory() as self.memory:
            torch.cuda.synchronize()
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(WARMUP_PASSES):
                    self._gradients(self.module(self.x))
            torch.cuda.synchronize()
            with torch.cuda.graph(self.forward, pool=pool):
                self.output: Tensor = self.module(self.x)
            with torch.cuda.graph(self.backward, pool=pool):
                self.gradients = self._gradients(self.output)
        self.output = self.output.detach()

    def __call__(self, x: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            captured: Tensor = self.module(x)
            return captured
        result: Tensor = _Replay.apply(self, x, *self.parameters)
        return result

    def _gradients(self, output: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(output, (self.x, *self.parameters), self.grad)


class _Replay(torch.autograd.Function):
    """Replays the forward graph, and in the backward pass the backward graph."""

    @staticmethod
    def forward(ctx: Any, graphs: GraphedBlock, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.graphs = graphs
        _copy_unless_same(graphs.x.detach(), x)
        graphs.forward.replay()
        return graphs.output.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        graphs: GraphedBlock = ctx.graphs
        _copy_unless_same(graphs.grad, grads[0])
        graphs.backward.replay()
        return None, *(each.detach() for each in graphs.gradients)


def _copy_unless_same(into: Tensor, source: Tensor) -> None:
    if into.data_ptr() != source.data_ptr():
        into.copy_(source)


def graphed(prepared: PreparedBlock, pool: Any = None) -> PreparedBlock:
    """Return the block with its passes captured. Its columns include the memory of the graphs. Collective."""
    run = GraphedBlock(prepared, pool)
    return dataclasses.replace(prepared, run=run, columns=lambda: {**prepared.columns(), "graph_gib": run.memory.gib})


@dataclass
class GraphMemory:
    """Memory that graphs hold between iterations, in GiB. torch does not count all of it as allocated."""

    gib: float = 0.0


@contextlib.contextmanager
def graph_memory() -> Iterator[GraphMemory]:
    """Measure the memory of the graphs that are captured within, on the current GPU."""
    memory = GraphMemory()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    yield memory
    torch.cuda.empty_cache()
    memory.gib = (torch.cuda.memory_reserved() - before) / 2**30


def free_graphs() -> None:
    """Free the memory of graphs that are no longer used. Their callables are parts of reference cycles."""
    gc.collect()
    torch.cuda.empty_cache()
