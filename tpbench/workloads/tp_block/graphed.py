"""The forward and the backward pass of a block as two CUDA graphs, behind the module's usual call."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tpbench.workloads.tp_block.prepared import PreparedBlock


class GraphedBlock:
    """Calls a block through two CUDA graphs: the host launches two graphs and no kernels.

    Gradients lie in memory of the graphs, which the next backward pass overwrites: use and free them before. While a
    stream is captured, the block is called without its own graphs.
    """

    def __init__(self, prepared: PreparedBlock, pool: Any = None) -> None:
        """Capture both passes. Collective. Graphs that share a `pool` must not run one within the other."""
        self.module = prepared.module
        with graph_memory() as self.memory:
            make: Any = torch.cuda.make_graphed_callables
            self.graphs: Any = make(_Inner(prepared.module), (prepared.x,), pool=pool)

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = (self.module if torch.cuda.is_current_stream_capturing() else self.graphs)(x)
        return result


class _Inner(nn.Module):
    """A module around another, whose own `forward` is not replaced by a graph."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)
        return result


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
    """Free the memory of graphs that nothing refers to any more: their callables are parts of reference cycles."""
    gc.collect()
    torch.cuda.empty_cache()
