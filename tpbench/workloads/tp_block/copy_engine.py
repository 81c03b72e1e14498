"""Our overlap: copy engines move chunks between GPUs while the products of other chunks have all SMs to themselves.

All-gather: each rank stages its shard in shared memory and pulls its peers' shards, nearest first, so that no two
ranks read from one at a time; the product of the own shard needs none of it and goes first. What is gathered for the
moment only is gathered where it is staged.

Reduce-scatter: the sum for each owner goes around the ring and ends with its owner. A rank pulls what the rank before
it has of a sum and adds its own product, mostly within the product: cuBLAS reads the addend where it writes the result,
so that no kernel of additions reads and writes everything once more. Beside a transfer runs the product for the next
owner; where there is none, the other half of the rows, or the product that follows it, as the weight's gradient does
the input's. Sums are rounded to the tensors' dtype at each rank, as NCCL's are; the order is the ring's.

Two buffers alternate for each. A rank copies in order, so that the word that it has something to be pulled in one
operation says too that it has pulled all that it wanted in the one before: its buffers are free in the next. Around the
ring that word has come from everybody when a rank has its own sum.

Copies within a GPU take SMs and so would wait for a product's end beside it: they go before it, on its stream, but for
a large shard's to where it is kept, which is queued behind those of the peers' and runs in the last wave of the product
beside it. Products follow each other on one stream: of two that may run at once the wrong one can be first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tpbench.comm.symmetric_buffers import SymmetricBuffers
from tpbench.workloads.tp_block.local_copy import copy_beside_compute
from tpbench.workloads.tp_block.schedule import Pending

STAGED, HANDED = range(2)
"""Channels of signals: there is something to pull, in a gather and in a scatter."""

PIECE = 2**22
"""Elements of a product's piece, at least: tiles of 128 x 256 for each of an H200's SMs. Smaller ones leave SMs idle,
which costs more than a kernel that adds."""

LARGE = 2**24
"""Bytes of a shard that is copied beside a product to where it is kept. With half of that the products' stream waits
about as long for one more event as the kernel takes that is saved."""


class CopyEngine:
    """Products of chunks by cuBLAS; `merged`: one of neighbouring peers' gathered chunks, which waits for the last."""

    def __init__(self, arena: SymmetricBuffers, *, merged: bool = False) -> None:
        self.arena, self.signals = arena, arena.signals
        self.rank, self.size, self.group = arena.rank, arena.size, arena.group
        self.divisor = self.size
        self.before, self.after = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        self.copies = arena.copies
        self.runs = peer_runs(self.rank, self.size, merged)
        self.peers = [peer for run in peer_runs(self.rank, self.size, merged=False) for peer in run]

    @property
    def memory(self) -> SymmetricBuffers:
        """What it shares with peers; others may have it too."""
        return self.arena

    def facts(self) -> dict[str, Any]:
        """Columns about its memory."""
        return {"workspace_gib": self.memory.gib}

    def gather(self, shard: Tensor) -> Pending:
        whole, arrived = self._pull(shard, keep=False)

        def finish() -> Tensor:
            self._until(arrived.values())
            self._end()
            return whole

        return finish

    def gather_matmul(self, shard: Tensor, matrix: Tensor, *, keep: bool = True) -> tuple[Tensor, Tensor]:
        whole, arrived = self._pull(shard, keep)
        product = shard.new_empty(len(whole), matrix.shape[1])
        sources, products = whole.chunk(self.size), product.chunk(self.size)
        torch.mm(shard, matrix, out=products[self.rank])
        for run in self.runs:
            self._until(arrived[peer] for peer in run)
            torch.mm(_rows(sources, run), matrix, out=_rows(products, run))
        if self.rank in arrived:
            self._until([arrived[self.rank]])
        self._end()
        return whole, product

    def matmul_scatter(self, whole: Tensor, matrix: Tensor, *, awaited: bool = False) -> Pending:
        """In step s a rank adds to the sum for the owner s + 1 ranks before it, in the last step to its own."""
        last = self.size - 1
        sources = whole.chunk(self.size)
        shape = (len(sources[0]), matrix.shape[1])
        parts = self._buffer("parts", (last, *shape), whole.dtype)
        total = whole.new_empty(shape)
        sums = [*parts[self.rank], total]  # of each step
        tight = awaited or self.size > 2  # a sum is under way when the product that is added to it could begin
        pieces = 2 if tight and total.numel() >= 2 * PIECE else 1
        arrived: list[torch.cuda.Event] = []
        for step in range(last):
            source, theirs = sources[(self.rank - 1 - step) % self.size], parts[self.before][step]
            cut = (each.chunk(pieces) for each in (source, sums[step], theirs, sums[step + 1]))
            addends, arrived = arrived, []
            for piece, (rows, into, taken, following) in enumerate(zip(*cut, strict=True)):
                self._add(rows, matrix, into, addends[piece : piece + 1], within=pieces > 1)
                arrived.append(self._hand_on(taken, following))

        def finish() -> Tensor:
            if awaited and pieces > 1:
                for rows, into, addend in zip(
                    sources[self.rank].chunk(pieces), total.chunk(pieces), arrived, strict=True
                ):
                    self._add(rows, matrix, into, [addend], within=True)
            else:
                self._add(sources[self.rank], matrix, total, arrived, within=not awaited)
            self._end()
            return total

        return finish

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
        """By rank, for this operation. In a captured graph, which has the same ones in each replay: once all are here,
        and so have done with them."""
        if torch.cuda.is_current_stream_capturing():
            self.arena.barrier()
        return self.arena.next(name, shape, dtype)

    def _pull(self, shard: Tensor, keep: bool) -> tuple[Tensor, dict[int, torch.cuda.Event]]:
        """Queue the copies of everybody's shard, the own one on the current stream: into memory of its own (`keep`) or
        to where it is staged, which the next gather but one takes again. By peer, when its shard is there; the own one
        is there already, or under way too."""
        staged = self._buffer("staged", (self.size, *shard.shape), shard.dtype)
        here = staged[self.rank]
        whole = torch.empty_like(here) if keep else here
        arrived = {peer: torch.cuda.Event() for peer in self.peers}
        here[self.rank].copy_(shard, non_blocking=True)
        self.copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.copies):
            for peer in self.peers:
                self.signals.send(STAGED, peer)
            for peer in self.peers:
                self.signals.wait(STAGED, peer)
                whole[peer].copy_(staged[peer][peer], non_blocking=True)
                arrived[peer].record()
            if keep and shard.nbytes >= LARGE and copy_beside_compute(whole[self.rank], shard):
                arrived[self.rank] = self.copies.record_event()
        if keep and self.rank not in arrived:
            whole[self.rank].copy_(shard, non_blocking=True)
        return whole.flatten(0, 1), arrived

    def _add(
        self, rows: Tensor, matrix: Tensor, into: Tensor, arrived: Sequence[torch.cuda.Event], *, within: bool
    ) -> None:
        """The product rows @ matrix, added to what has arrived (nothing: to 0): `within` it, or after it, so that it
        need not wait."""
        if not arrived:
            torch.mm(rows, matrix, out=into)
        elif within:
            self._until(arrived)
            into.addmm_(rows, matrix)
        else:
            product = rows @ matrix
            self._until(arrived)
            into.add_(product)

    def _hand_on(self, theirs: Tensor, mine: Tensor) -> torch.cuda.Event:
        """After the current stream's last product: tell the next rank that it can have it, and pull what the rank
        before has. When that is here."""
        self.copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.copies):
            self.signals.send(HANDED, self.after)
            self.signals.wait(HANDED, self.before)
            mine.copy_(theirs, non_blocking=True)
            return self.copies.record_event()

    def _until(self, arrived: Iterable[torch.cuda.Event]) -> None:
        for each in arrived:
            torch.cuda.current_stream().wait_event(each)

    def _end(self) -> None:
        """A captured graph ends on one stream."""
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().wait_stream(self.copies)


def peer_runs(rank: int, size: int, merged: bool) -> list[range]:
    """A rank's peers, from the next one on around: one by one, or as the at most two runs of neighbours."""
    if merged:
        return [run for run in (range(rank + 1, size), range(rank)) if run]
    return [range(peer, peer + 1) for peer in (*range(rank + 1, size), *range(rank))]


def _rows(chunks: tuple[Tensor, ...], run: range) -> Tensor:
    """Neighbouring chunks of a matrix as one view of it."""
    first = chunks[run.start]
    return first.as_strided((len(first) * len(run), first.shape[1]), first.stride())
