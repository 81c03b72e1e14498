"""Our overlap: copy engines move chunks between GPUs while the products of other chunks use all SMs.

All-gather. Each rank pushes its shard from where it lies to its peers' symmetric memory, the next rank first, so that
no two ranks write to the same peer at once. The product of the own shard needs no transfer and runs first. Shards are
multiplied where they arrive. A gathered tensor that is kept is copied from there.

Reduce-scatter. The sum for each owner travels around the ring of ranks and ends at its owner. A rank pulls the partial
sum from the rank before it and adds its own product. The addition is usually part of the product: cuBLAS reads the
addend where it writes the result, so that no separate kernel reads and writes everything again. The product for the
next owner runs beside each transfer. The last transfer runs beside the other half of the rows, or beside the product
that follows, such as the weight's gradient. Each rank rounds a sum to the tensors' dtype, as NCCL does, in ring order.

Buffers. Each name has two buffers that alternate. A rank copies in order, behind its earlier products. Its signal in
one operation therefore also says that it has finished the operation before, whose buffers are free in the next. In the
ring such a signal has come from every rank when a rank has its own sum.

Copies within a GPU use SMs, and beside a product they wait for its last wave. So no product waits for one, and those of
a gathered tensor are queued behind all transfers. All products are on one stream, because the GPU may start two
concurrent products in the wrong order.

`tpbench/docs/tp_block.md` says what was tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tpbench.comm.parallel_linears import Pending, Schedule
from tpbench.comm.symmetric_buffers import SymmetricBuffers

SHARD, PARTIAL_SUM = range(2)
"""Signal channels: a shard has arrived, or a partial sum is ready to be pulled."""

MIN_PIECE_ELEMENTS = 2**22
"""Smallest number of elements of a product's piece: tiles of 128 x 256 for each SM of an H200. Smaller pieces leave SMs
idle, which costs more than a separate kernel that adds."""


class CopyEngineSchedule(Schedule):
    """Products of chunks by cuBLAS beside copies by the copy engines."""

    def __init__(self, buffers: SymmetricBuffers) -> None:
        self.buffers = buffers
        self.rank, self.size, self.group = buffers.rank, buffers.size, buffers.group
        self.before, self.after = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        self.copies = buffers.copies
        self.peers = [*range(self.rank + 1, self.size), *range(self.rank)]
        """The other ranks, in ring order after this one."""

    @property
    def gib(self) -> float:
        """The symmetric memory of this rank, in GiB."""
        return self.buffers.gib

    @property
    def signals(self) -> Any:
        """The signals of the buffers, while capturing those that a graph can hold."""
        capturing = torch.cuda.is_current_stream_capturing()
        return self.buffers.captured_signals if capturing else self.buffers.signals

    def gather(self, shard: Tensor) -> Pending:
        gathered, whole, _ = self._push(shard, keep=False)
        copied = self._copy_rows(whole, shard, gathered)

        def finish() -> Tensor:
            self._wait([copied])
            return whole.flatten(0, 1)

        return finish

    def gather_matmul(self, shard: Tensor, matrix: Tensor, *, keep: bool = True) -> tuple[Pending, Tensor]:
        gathered, whole, arrived = self._push(shard, keep)
        product = shard.new_empty(self.size * len(shard), matrix.shape[1])
        products = product.chunk(self.size)
        torch.mm(shard, matrix, out=products[self.rank])
        for peer, event in arrived.items():
            self._wait([event])
            torch.mm(gathered[peer], matrix, out=products[peer])

        def finish() -> Tensor:
            self._wait([self._copy_rows(whole, shard, gathered)])
            return whole.flatten(0, 1)

        return finish, product

    def matmul_scatter(self, whole: Tensor, matrix: Tensor, *, awaited: bool = False) -> Pending:
        """Step s computes the sum for the owner s + 1 ranks back; the last step computes this rank's own."""
        last = self.size - 1
        sources = whole.chunk(self.size)
        shape = (len(sources[0]), matrix.shape[1])
        parts = self._buffer("parts", (last, *shape), whole.dtype)
        total = whole.new_empty(shape)
        sums = [*parts[self.rank], total]  # by step
        # The addend is still in transfer when its product could start.
        addend_arrives_late = awaited or self.size > 2
        pieces = 2 if addend_arrives_late and total.numel() >= 2 * MIN_PIECE_ELEMENTS else 1
        arrived: list[torch.cuda.Event] = []
        for step in range(last):
            source, theirs = sources[(self.rank - 1 - step) % self.size], parts[self.before][step]
            cut = (tensor.chunk(pieces) for tensor in (source, sums[step], theirs, sums[step + 1]))
            addends, arrived = arrived, []
            for piece, (rows, into, pulled, following) in enumerate(zip(*cut, strict=True)):
                self._add_product(rows, matrix, into, addends[piece : piece + 1], fused=pieces > 1)
                arrived.append(self._pull_sum(pulled, following))

        def finish() -> Tensor:
            if awaited and pieces > 1:
                for rows, into, addend in zip(
                    sources[self.rank].chunk(pieces), total.chunk(pieces), arrived, strict=True
                ):
                    self._add_product(rows, matrix, into, [addend], fused=True)
            else:
                self._add_product(sources[self.rank], matrix, total, arrived, fused=not awaited)
            if torch.cuda.is_current_stream_capturing():  # a captured graph must end on one stream
                torch.cuda.current_stream().wait_stream(self.copies)
            return total

        return finish

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
        """Each rank's buffer of this operation, by rank.

        A replay of a graph begins with the buffer of the capture's first use. The last use before may have been of the
        same buffer, therefore the graph begins with a barrier. Within it, buffers alternate as they do without one. A
        replay doesn't count as a use. Work outside of graphs must therefore begin when all ranks' replays have ended.
        """
        capturing = torch.cuda.is_current_stream_capturing()
        if capturing and not self.buffers.capturing:
            self.buffers.barrier()
        self.buffers.capturing = capturing
        return self.buffers.next(name, shape, dtype)

    def _push(self, shard: Tensor, keep: bool) -> tuple[Tensor, Tensor, dict[int, torch.cuda.Event]]:
        """Queue the copies of this rank's shard to its peers.

        Return the buffer of the arriving shards, which the next gather but one overwrites; the gathered tensor that
        `_copy_rows` completes, new memory if it is kept; and an event for each peer's shard, in the order of arrival.
        """
        buffers = self._buffer("gathered", (self.size, *shard.shape), shard.dtype)
        gathered = buffers[self.rank]
        # Made before the copies wait for earlier products, which may still use this memory.
        whole = torch.empty_like(gathered) if keep else gathered
        arrived = {}
        self.copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.copies):
            for target, source in zip(self.peers, reversed(self.peers), strict=True):
                buffers[target][self.rank].copy_(shard, non_blocking=True)
                self.signals.put_signal(target, SHARD)
                self.signals.wait_signal(source, SHARD)
                arrived[source] = self.copies.record_event()
        return gathered, whole, arrived

    def _copy_rows(self, whole: Tensor, shard: Tensor, gathered: Tensor) -> torch.cuda.Event:
        """Queue the copies of the own shard, and of those gathered elsewhere, behind all transfers."""
        with torch.cuda.stream(self.copies):
            whole[self.rank].copy_(shard, non_blocking=True)
            if whole is not gathered:
                for peer in self.peers:
                    whole[peer].copy_(gathered[peer], non_blocking=True)
            return self.copies.record_event()

    def _add_product(
        self, rows: Tensor, matrix: Tensor, into: Tensor, arrived: Sequence[torch.cuda.Event], *, fused: bool
    ) -> None:
        """Add rows @ matrix to the addend in `into` when it has arrived, or overwrite `into` if there is none.

        `fused`: one kernel multiplies and adds. Otherwise only the second kernel, which adds, waits for the addend.
        """
        if not arrived:
            torch.mm(rows, matrix, out=into)
        elif fused:
            self._wait(arrived)
            into.addmm_(rows, matrix)
        else:
            product = rows @ matrix
            self._wait(arrived)
            into.add_(product)

    def _pull_sum(self, theirs: Tensor, mine: Tensor) -> torch.cuda.Event:
        """Signal the next rank that the current stream's last sum is ready. Pull the previous rank's sum."""
        self.copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.copies):
            self.signals.put_signal(self.after, PARTIAL_SUM)
            self.signals.wait_signal(self.before, PARTIAL_SUM)
            mine.copy_(theirs, non_blocking=True)
            return self.copies.record_event()

    def _wait(self, arrived: Iterable[torch.cuda.Event]) -> None:
        for event in arrived:
            torch.cuda.current_stream().wait_event(event)
