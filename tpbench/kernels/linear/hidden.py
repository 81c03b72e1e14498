"""Hidden states and their gradient across ranks, chunk by chunk, beside matrix products of other chunks.

A collective starts behind the product that makes its data, and runs beside the products after it. `wait` must be called
before the kernels of a loss start. Those may occupy the whole GPU until all ranks answer, and a collective that has
started on some ranks only would never end then.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.kernels.collectives import all_gather, reduce_scatter
from tpbench.kernels.linear.chunks import Chunks


class HiddenStates(Protocol):
    """The hidden states of all chunks, and the sum of their gradients over ranks."""

    def chunk(self, index: int) -> Tensor:
        """Return the hidden states of a chunk, (rows of the chunk, h)."""

    def prefetch(self, index: int) -> None:
        """Start to fetch a chunk, if it exists."""

    def gradient(self, index: int) -> Tensor:
        """Return memory for this rank's part of a chunk's gradient, (rows of the chunk, h)."""

    def send_gradient(self, index: int) -> None:
        """Start to sum the chunk's gradient over ranks."""

    def wait(self) -> None:
        """Let the current stream wait for all that was started."""


class WholeHiddenStates:
    """Every rank holds all rows. Gradients of chunks are summed by all-reduces."""

    def __init__(self, hidden: Tensor, grad: Tensor | None, group: dist.ProcessGroup | None, chunks: Chunks) -> None:
        self.hidden, self.grad, self.group, self.chunks = hidden, grad, group, chunks
        self.pending: list[Any] = []

    def chunk(self, index: int) -> Tensor:
        return self.chunks.take(self.hidden, index)

    def prefetch(self, index: int) -> None:
        pass

    def gradient(self, index: int) -> Tensor:
        assert self.grad is not None
        return self.chunks.take(self.grad, index)

    def send_gradient(self, index: int) -> None:
        if self.group is not None and self.group.size() > 1:
            self.pending.append(dist.all_reduce(self.gradient(index), group=self.group, async_op=True))

    def wait(self) -> None:
        while self.pending:
            self.pending.pop().wait()


class ShardedHiddenStates:
    """Each rank holds an equal part of the rows. Chunks are gathered, and their gradients reduce-scattered."""

    def __init__(self, hidden: Tensor, grad: Tensor | None, group: dist.ProcessGroup, chunks: Chunks) -> None:
        self.hidden, self.grad, self.group, self.chunks = hidden, grad, group, chunks
        shape = (2 if len(chunks) > 1 else 1, chunks.most, hidden.shape[1])
        self.gathered = hidden.new_empty(shape)
        self.summed = None if grad is None else hidden.new_empty(shape[1:])
        self.pending: list[Any] = []
        self.prefetch(0)

    def _rows(self, index: int) -> int:
        rows = self.chunks.local(index)
        return int(rows.stop - rows.start) * self.chunks.shards

    def chunk(self, index: int) -> Tensor:
        self.wait()
        return self.gathered[index % len(self.gathered), : self._rows(index)]

    def prefetch(self, index: int) -> None:
        if index < len(self.chunks):
            part = self.hidden[self.chunks.local(index)].contiguous()
            gathered = self.gathered[index % len(self.gathered), : self._rows(index)]
            self.pending.append(all_gather(gathered, part, group=self.group, async_op=True))

    def gradient(self, index: int) -> Tensor:
        assert self.summed is not None
        return self.summed[: self._rows(index)]

    def send_gradient(self, index: int) -> None:
        assert self.grad is not None
        part = self.grad[self.chunks.local(index)]
        self.pending.append(reduce_scatter(part, self.gradient(index), group=self.group, async_op=True))

    def wait(self) -> None:
        while self.pending:
            self.pending.pop().wait()


def hidden_states(hidden: Tensor, grad: Tensor | None, group: dist.ProcessGroup | None, chunks: Chunks) -> HiddenStates:
    """Return the hidden states of all rows. chunks.shards says whether ranks share them."""
    if chunks.shards > 1:
        assert group is not None
        return ShardedHiddenStates(hidden, grad, group, chunks)
    return WholeHiddenStates(hidden, grad, group, chunks)


def bytes_sent(rows: int, width: int, itemsize: int, world_size: int, *, sharded: bool, grad: bool) -> int:
    """Return the bytes that a rank sends: each of its parts to every peer once (gather, scatter), or twice."""
    matrices = (1 if sharded else 0) + (0 if not grad else 1 if sharded else 2)
    return matrices * rows * width * itemsize * (world_size - 1) // world_size


def gradient_like(hidden: Tensor) -> Tensor:
    """Return contiguous memory for the gradient of hidden states."""
    return torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
