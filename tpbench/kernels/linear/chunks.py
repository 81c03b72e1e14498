"""The rows of a linear loss in chunks, the hidden states of chunks across ranks, and products of matrices.

A collective starts behind the product that makes its data, and runs beside the products after it. `wait` must be called
before the kernels of a loss start. Those may occupy the whole GPU until all ranks answer, and a collective that has
started on some ranks only would never end then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.kernels.collectives import all_gather, reduce_scatter

AUTO_GIB = 0.5
"""Workspace for workspace_gib="auto": 4096 rows of a vocabulary of 131,072 over two ranks, in bf16. With fewer rows the
weight's gradient, which is read and written once per chunk, takes a larger share of its product."""
AUTO_ROWS = 1024
"""Fewest rows of a chunk for workspace_gib="auto"."""
_MULTIPLE = 128
"""Rows of a chunk are a multiple of this where memory allows it, as are the tiles of matrix products."""


@dataclass(frozen=True)
class Chunks:
    """Equal chunks of rows, the last one perhaps smaller. Rows that ranks share are taken from all ranks' parts."""

    rows: int
    """Rows of the problem."""
    most: int
    """Rows of a chunk."""
    shards: int
    """Ranks that hold rows / shards of the hidden states each. 1: each rank holds all rows."""

    def __len__(self) -> int:
        return -(-self.rows // self.most) if self.rows else 0

    def local(self, index: int) -> slice:
        """Return the rows of a chunk, as rows of one rank's part."""
        step, part = self.most // self.shards, self.rows // self.shards
        return slice(index * step, min((index + 1) * step, part))

    def rows_of(self, index: int) -> int:
        """Return the number of rows of a chunk."""
        rows = self.local(index)
        return int(rows.stop - rows.start) * self.shards

    def take(self, values: Tensor, index: int) -> Tensor:
        """Return a chunk of a tensor of all rows: a view if ranks do not share rows, else contiguous, in rank order."""
        if self.shards == 1:
            return values[self.local(index)]
        return self._by_rank(values)[:, self.local(index)].flatten(0, 1).contiguous()

    def put(self, values: Tensor, chunk: Tensor, index: int) -> None:
        """Store a chunk that `take` may have copied."""
        if self.shards > 1:
            self._by_rank(values)[:, self.local(index)] = chunk.view(self.shards, -1, *chunk.shape[1:])

    def in_order(self, values: Tensor) -> Tensor:
        """Return the rows of all chunks, one chunk behind the other, contiguous."""
        if self.shards == 1:
            return values.contiguous()
        return torch.cat([self.take(values, index) for index in range(len(self))])

    def put_all(self, values: Tensor, in_order: Tensor) -> None:
        """Store the rows of all chunks, one chunk behind the other in `in_order`, if ranks share rows."""
        first = 0
        for index in range(len(self)):
            self.put(values, in_order[first : first + self.rows_of(index)], index)
            first += self.rows_of(index)

    def _by_rank(self, values: Tensor) -> Tensor:
        return values.view(self.shards, self.rows // self.shards, *values.shape[1:])


def chunks_of(rows: int, shards: int, row_bytes: int, workspace_gib: float | Literal["auto"]) -> Chunks:
    """Return as few chunks as the workspace allows, of about equal size. The least chunk is a row of each shard.

    row_bytes: must be the same on all ranks, since chunks are.
    """
    gib = AUTO_GIB if workspace_gib == "auto" else workspace_gib
    allowed = max(int(gib * 2**30 / max(1, row_bytes)), AUTO_ROWS if workspace_gib == "auto" else 1)
    if rows <= allowed:
        return Chunks(rows, max(rows, shards), shards)
    number = -(-rows // allowed)
    most = -(-rows // number)
    unit = shards * (_MULTIPLE if most > _MULTIPLE * shards else 1)
    rounded = -(-most // unit) * unit
    if rounded > allowed:
        rounded = max(allowed // unit, 1) * unit
    return Chunks(rows, rounded, shards)


class HiddenStates:
    """The hidden states of all chunks, which every rank holds. Gradients of chunks are summed by all-reduces."""

    def __init__(self, hidden: Tensor, grad: Tensor | None, group: dist.ProcessGroup | None, chunks: Chunks) -> None:
        """`grad`: the memory for the gradient of `hidden`, summed over ranks."""
        self.hidden, self.grad, self.group, self.chunks = hidden, grad, group, chunks
        self.pending: list[Any] = []

    def chunk(self, index: int) -> Tensor:
        """Return the hidden states of a chunk, (rows of the chunk, h)."""
        return self.chunks.take(self.hidden, index)

    def prefetch(self, index: int) -> None:
        """Start to fetch a chunk, if it exists."""

    def gradient(self, index: int) -> Tensor:
        """Return memory for this rank's part of a chunk's gradient, (rows of the chunk, h)."""
        assert self.grad is not None
        return self.chunks.take(self.grad, index)

    def send_gradient(self, index: int) -> None:
        """Start to sum the chunk's gradient over ranks."""
        if self.group is not None and self.group.size() > 1:
            self.pending.append(dist.all_reduce(self.gradient(index), group=self.group, async_op=True))

    def wait(self) -> None:
        """Let the current stream wait for all that was started."""
        while self.pending:
            self.pending.pop().wait()


class ShardedHiddenStates(HiddenStates):
    """Each rank holds an equal part of the rows. Chunks are gathered, and their gradients reduce-scattered."""

    def __init__(self, hidden: Tensor, grad: Tensor | None, group: dist.ProcessGroup | None, chunks: Chunks) -> None:
        super().__init__(hidden, grad, group, chunks)
        shape = (2 if len(chunks) > 1 else 1, chunks.most, hidden.shape[1])
        self.gathered = hidden.new_empty(shape)
        self.summed = None if grad is None else hidden.new_empty(shape[1:])
        self.prefetch(0)

    def chunk(self, index: int) -> Tensor:
        self.wait()
        return self._gathered(index)

    def prefetch(self, index: int) -> None:
        if index < len(self.chunks):
            part = self.hidden[self.chunks.local(index)].contiguous()
            self.pending.append(all_gather(self._gathered(index), part, group=self.group, async_op=True))

    def gradient(self, index: int) -> Tensor:
        assert self.summed is not None
        return self.summed[: self.chunks.rows_of(index)]

    def send_gradient(self, index: int) -> None:
        assert self.grad is not None
        part = self.grad[self.chunks.local(index)]
        self.pending.append(reduce_scatter(part, self.gradient(index), group=self.group, async_op=True))

    def _gathered(self, index: int) -> Tensor:
        return self.gathered[index % len(self.gathered), : self.chunks.rows_of(index)]


def hidden_states(hidden: Tensor, grad: Tensor | None, group: dist.ProcessGroup | None, chunks: Chunks) -> HiddenStates:
    """Return the hidden states of all rows. chunks.shards says whether ranks share them."""
    return (ShardedHiddenStates if chunks.shards > 1 else HiddenStates)(hidden, grad, group, chunks)


def bytes_sent(chunks: Chunks, states: Tensor, world_size: int, grad: bool) -> int:
    """Return the bytes that a rank sends of hidden states and of their gradients.

    It sends each of its parts to every peer once (gather, scatter), or twice (all-reduce).
    """
    sharded = chunks.shards > 1
    matrices = (1 if sharded else 0) + (0 if not grad else 1 if sharded else 2)
    return matrices * chunks.rows * states.shape[1] * states.itemsize * (world_size - 1) // world_size


def multiply(left: Tensor, right: Tensor, out: Tensor, alpha: float = 1.0) -> None:
    """Store alpha * left @ right in `out`. The product is rounded once, after the factor."""
    if alpha == 1.0:
        torch.mm(left, right, out=out)
    else:
        torch.addmm(out, left, right, beta=0, alpha=alpha, out=out)


def add_product(left: Tensor, right: Tensor, out: Tensor, alpha: float = 1.0) -> None:
    """Add alpha * left @ right to `out`, whose dtype is that of the factors or fp32. The sum is rounded once.

    torch adds to fp32 inside the product on CUDA devices only (out_dtype of torch.addmm, torch 2.11 to 2.13).
    """
    if out.dtype == left.dtype:
        torch.addmm(out, left, right, alpha=alpha, out=out)
    elif out.is_cuda and out.is_contiguous():
        torch.addmm(out, left, right, alpha=alpha, out_dtype=out.dtype, out=out)
    else:
        out.addmm_(left.to(out.dtype), right.to(out.dtype), alpha=alpha)


def compute_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Store hidden @ weight.T + bias in `out`."""
    if bias is None:
        multiply(hidden, weight.t(), out)
    else:
        torch.addmm(bias, hidden, weight.t(), out=out)


class WeightGradient:
    """The gradients of weight and bias, summed over chunks. The bias's sum is kept in fp32."""

    def __init__(self, weight: Tensor | None, bias: Tensor | None, given: Tensor | None, chunks: int) -> None:
        """`weight`, `bias`: None if there is none, or it needs no gradient.

        `given`: the tensor to add the weight's gradient to. None: the gradient gets new memory.
        """
        self.is_empty = given is None
        """True if the memory of `weight` is not yet defined."""
        empty = torch.empty if chunks else torch.zeros
        self.weight = given
        if weight is not None and given is None:
            self.weight = empty(weight.shape, dtype=weight.dtype, device=weight.device)
        self._bias = bias
        self._bias_sum = None if bias is None else torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)

    def add(self, grad_logits: Tensor, hidden: Tensor, factor: float) -> None:
        """Add factor * grad_logits.T @ hidden. grad_logits: (rows, local vocab), hidden: (rows, h)."""
        if self.weight is not None and self.is_empty:
            multiply(grad_logits.t(), hidden, self.weight, factor)
            self.is_empty = False
        elif self.weight is not None:
            add_product(grad_logits.t(), hidden, self.weight, factor)
        if self._bias_sum is not None:
            self._bias_sum.add_(grad_logits.sum(0, dtype=torch.float32), alpha=factor)

    @property
    def bias(self) -> Tensor | None:
        """The bias's gradient in the bias's dtype, (local vocab,), or None."""
        return None if self._bias is None or self._bias_sum is None else self._bias_sum.to(self._bias.dtype)
