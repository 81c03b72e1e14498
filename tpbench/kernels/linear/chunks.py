"""The rows of a linear loss in chunks, the logits of a chunk, sums over ranks, and products of matrices.

A collective starts behind the product that makes its data, and runs beside the products after it. `wait` must be called
before the kernels of a loss start. Those may occupy the whole GPU until all ranks answer, and a collective that has
started on some ranks only would never end then.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.kernels.distributed import all_gather, reduce_scatter
from tpbench.kernels.kernel_arguments import RowInputs, TopTarget

AUTO_GIB = 0.5
"""Workspace for workspace_gib="auto": 4096 rows of a vocabulary of 131,072 over two ranks, in bf16. With fewer rows the
weight's gradient, which is read and written once per chunk, takes a larger share of its product."""
AUTO_ROWS = 1024
"""Fewest rows of a chunk for workspace_gib="auto"."""
_MULTIPLE = 128
"""Rows of a chunk are a multiple of this where memory allows it, as are the tiles of matrix products."""


@dataclass(frozen=True)
class Chunks:
    """Chunks of rows. Rows that ranks share are taken from all ranks' parts."""

    ends: tuple[int, ...]
    """The row after each chunk."""
    shards: int
    """Ranks that hold rows / shards of the hidden states each. 1: each rank holds all rows."""
    lengths: tuple[tuple[int, ...], ...] = ()
    """The lengths of the sequences of each chunk, if chunks have whole sequences."""

    @property
    def most(self) -> int:
        """Rows of the largest chunk."""
        return max((rows.stop - rows.start for rows in map(self.__getitem__, range(len(self)))), default=0)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> slice:
        """Return the rows of a chunk, in the order of chunks."""
        return slice(self.ends[index - 1] if index else 0, self.ends[index])

    def part(self, index: int) -> slice:
        """Return the rows of a chunk, as rows of one rank's part."""
        rows = self[index]
        return slice(rows.start // self.shards, rows.stop // self.shards)

    def take(self, values: Any, index: int) -> Any:
        """Return a chunk of a tensor of all rows or None, or of each of several, in rank order."""
        if isinstance(values, (RowInputs, TopTarget)):
            return type(values)(*[self.take(of_rows, index) for of_rows in values])
        if values is None or self.shards == 1:
            return values if values is None else values[self[index]]
        return values.unflatten(0, (self.shards, -1))[:, self.part(index)].flatten(0, 1).contiguous()

    def in_rows(self, values: Any) -> Any:
        """Return numbers of the rows of all chunks, (rows,) or None, in the order of rows."""
        if values is None or self.shards == 1 or not len(self):
            return values
        return torch.cat([values[self[index]].view(self.shards, -1) for index in range(len(self))], 1).flatten()


def chunks_of(
    rows: int, shards: int, row_bytes: int, workspace_gib: float | Literal["auto"], lengths: Sequence[int] | None = None
) -> Chunks:
    """Return as few chunks as the workspace allows, of about equal size and at least a row of each shard.

    row_bytes: equal on all ranks. lengths: of sequences, which stay whole. One that is longer than a chunk is a chunk.
    """
    gib = AUTO_GIB if workspace_gib == "auto" else workspace_gib
    allowed = max(int(gib * 2**30 / max(1, row_bytes)), AUTO_ROWS if workspace_gib == "auto" else 1)
    if lengths is not None:
        chunks: list[list[int]] = []
        for length in lengths:
            if not chunks or sum(chunks[-1]) + length > allowed:
                chunks.append([])
            chunks[-1].append(length)
        return Chunks(tuple(itertools.accumulate(map(sum, chunks))), 1, tuple(map(tuple, chunks)))
    if rows <= allowed:
        return Chunks((rows,) if rows else (), shards)
    number = -(-rows // allowed)
    most = -(-rows // number)
    unit = shards * (_MULTIPLE if most > _MULTIPLE * shards else 1)
    rounded = -(-most // unit) * unit
    if rounded > allowed:
        rounded = max(allowed // unit, 1) * unit
    return Chunks((*range(rounded, rows, rounded), rows), shards)


class ChunkLogits:
    """The logits hidden @ weight.T + bias of one chunk at a time, in memory that all chunks share.

    If ranks share rows, the hidden states of chunks are gathered, and their gradients reduce-scattered. Else each rank
    has all rows, and gradients are all-reduced.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor | None,
        group: dist.ProcessGroup | None, chunks: Chunks, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        """`grad`: the memory for the gradient of `hidden`, summed over ranks. dtype: of the logits."""
        self.hidden, self.weight, self.bias, self.grad = hidden, weight, bias, grad
        self.group, self.chunks = group, chunks
        self.memory = weight.new_empty((chunks.most, len(weight)), dtype=dtype)
        self.world_size = 1 if group is None else group.size()
        self.pending: list[Any] = []
        self.moved = 0
        """Bytes of chunks that were gathered or scattered. An all-reduce does both."""
        if chunks.shards > 1:
            shape = (2 if len(chunks) > 1 else 1, chunks.most, hidden.shape[1])
            self.gathered = hidden.new_empty(shape)
            self.summed = hidden.new_empty(shape[1:] if grad is not None else (0,))
            self.prefetch(0)

    def compute(self, index: int) -> tuple[Tensor, Tensor]:
        """Queue the product of a chunk. Return its hidden states, (rows of the chunk, h), and its logits."""
        if self.chunks.shards == 1:
            hidden = self.hidden[self.chunks[index]]
        else:
            self.wait()
            hidden = self._gathered(index)
        logits = self.memory[: len(hidden)]
        if self.bias is not None and logits.dtype == self.bias.dtype:
            torch.addmm(self.bias, hidden, self.weight.t(), out=logits)
        else:
            product(hidden, self.weight.t(), logits)
            if self.bias is not None:
                logits += self.bias
        return hidden, logits

    def prefetch(self, index: int) -> None:
        """Start to gather a chunk, if it exists."""
        if self.chunks.shards > 1 and index < len(self.chunks):
            part = self.hidden[self.chunks.part(index)].contiguous()
            chunk = self._gathered(index)
            self.pending.append(all_gather(chunk, part, group=self.group, async_op=True))
            self.moved += chunk.nbytes

    def send_gradient(self, index: int, grad_logits: Tensor, factor: float, of_rows: Tensor | None) -> None:
        """Queue the product factor * grad_logits @ weight, times factors of rows if given, and its sum over ranks."""
        if self.grad is None:
            return
        is_shared = self.chunks.shards > 1
        gradient = self.summed[: len(grad_logits)] if is_shared else self.grad[self.chunks[index]]
        product(grad_logits, self.weight, gradient, factor)
        if of_rows is not None:
            gradient *= of_rows[:, None]
        if is_shared:
            part = self.grad[self.chunks.part(index)]
            self.pending.append(reduce_scatter(part, gradient, group=self.group, async_op=True))
            self.moved += gradient.nbytes
        elif self.world_size > 1:
            self.pending.append(dist.all_reduce(gradient, group=self.group, async_op=True))
            self.moved += 2 * gradient.nbytes

    def wait(self) -> None:
        """Let the current stream wait for all that was started."""
        while self.pending:
            self.pending.pop().wait()

    def _gathered(self, index: int) -> Tensor:
        rows = self.chunks[index]
        return self.gathered[index % len(self.gathered), : rows.stop - rows.start]


def product(left: Tensor, right: Tensor, out: Tensor, alpha: float = 1.0, beta: float = 0.0) -> None:
    """Store alpha * left @ right + beta * out in `out`, whose dtype is that of the factors or fp32, rounded once."""
    if out.dtype == left.dtype:
        torch.addmm(out, left, right, beta=beta, alpha=alpha, out=out)
    elif out.is_cuda and out.is_contiguous():  # torch 2.11 to 2.13 has out_dtype on CUDA devices only
        torch.addmm(out, left, right, beta=beta, alpha=alpha, out_dtype=out.dtype, out=out)
    else:
        out.addmm_(left.to(out.dtype), right.to(out.dtype), beta=beta, alpha=alpha)
