"""Our overlap: copy engines move chunks between GPUs while the products of other chunks have all SMs to themselves.

All-gather: each rank stages its shard in shared memory and pulls its peers' shards, nearest first, so that no two
ranks read from one at a time; the product of the own shard needs none of it and goes first. Reduce-scatter: the
products of the peers' rows go first, each pushed into its owner's memory when it is finished, the own rows last; the
owner adds the parts up in fp32, in the order of ranks. Two buffers alternate for each, so that only a rank that is two
operations ahead of a peer waits for it.

Copies within a GPU take SMs and so would wait for a product's end beside it: they go before it, on its stream. Products
follow each other on one stream: of two that may run at once the wrong one can be first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpbench.workloads.arena import Arena
from tpbench.workloads.tp_block.schedule import Pending

STAGED, PULLED, PUSHED, TAKEN = range(0, 8, 2)
"""Channels of signals, each with one more for the other of the alternating buffers."""


class CopyEngine:
    """Products of chunks by cuBLAS; `merged`: one of neighbouring peers' chunks, which waits for the last of them."""

    def __init__(self, arena: Arena, *, merged: bool = False) -> None:
        self.arena, self.signals = arena, arena.signals
        self.rank, self.size, self.group = arena.rank, arena.size, arena.group
        self.copies = arena.copies
        self.runs = peer_runs(self.rank, self.size, merged)
        self.peers = [peer for run in peer_runs(self.rank, self.size, merged=False) for peer in run]

    def facts(self) -> dict[str, Any]:
        """Columns about its memory."""
        return {"workspace_gib": self.arena.gib}

    def gather(self, shard: Tensor) -> Pending:
        whole = shard.new_empty(self.size * len(shard), shard.shape[1])
        arrived = self._pull(shard, whole)

        def finish() -> Tensor:
            for peer in self.peers:
                torch.cuda.current_stream().wait_event(arrived[peer])
            return whole

        return finish

    def gather_matmul(self, shard: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
        whole = shard.new_empty(self.size * len(shard), shard.shape[1])
        product = shard.new_empty(len(whole), matrix.shape[1])
        sources, products = whole.chunk(self.size), product.chunk(self.size)
        arrived = self._pull(shard, whole)
        torch.mm(shard, matrix, out=products[self.rank])
        for run in self.runs:
            for peer in run:
                torch.cuda.current_stream().wait_event(arrived[peer])
            torch.mm(_rows(sources, run), matrix, out=_rows(products, run))
        return whole, product

    def matmul_scatter(self, whole: Tensor, matrix: Tensor) -> Pending:
        sources = whole.chunk(self.size)
        inbox = self.arena.next("inbox", (self.size, len(sources[0]), matrix.shape[1]), whole.dtype)
        mine = inbox.of[self.rank]
        leaving = torch.empty_like(mine)
        for run in self.runs:
            torch.mm(_rows(sources, run), matrix, out=leaving[run.start : run.stop].flatten(0, 1))
            self.copies.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.copies):
                for peer in run:
                    if inbox.used_before:
                        self.signals.wait(TAKEN + inbox.turn, peer)
                    inbox.of[peer][self.rank].copy_(leaving[peer], non_blocking=True)
                    self.signals.send(PUSHED + inbox.turn, peer)
        pushed = self.copies.record_event()
        torch.mm(sources[self.rank], matrix, out=mine[self.rank])
        held = [leaving]  # the copies read it: until they have, its memory must not serve others

        def finish() -> Tensor:
            here = torch.cuda.current_stream()
            for peer in self.peers:
                self.signals.wait(PUSHED + inbox.turn, peer)
            total = mine.sum(0)  # adds in fp32, rounds once
            self.copies.wait_stream(here)
            with torch.cuda.stream(self.copies):
                for peer in self.peers:
                    self.signals.send(TAKEN + inbox.turn, peer)
            here.wait_event(pushed)
            held.clear()
            if torch.cuda.is_current_stream_capturing():
                here.wait_stream(self.copies)  # a captured graph ends on one stream
            return total

        return finish

    def _pull(self, shard: Tensor, whole: Tensor) -> dict[int, torch.cuda.Event]:
        """Queue the copies of everybody's shard into `whole`, the own one on the current stream; by peer, when its
        shard is there."""
        stage = self.arena.next("stage", tuple(shard.shape), shard.dtype)
        chunks = whole.chunk(self.size)
        arrived = {peer: torch.cuda.Event() for peer in self.peers}
        for peer in self.peers if stage.used_before else ():
            self.signals.wait(PULLED + stage.turn, peer)
        stage.of[self.rank].copy_(shard, non_blocking=True)
        self.copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.copies):
            for peer in self.peers:
                self.signals.send(STAGED + stage.turn, peer)
            for peer in self.peers:
                self.signals.wait(STAGED + stage.turn, peer)
                chunks[peer].copy_(stage.of[peer], non_blocking=True)
                arrived[peer].record()
                self.signals.send(PULLED + stage.turn, peer)
        chunks[self.rank].copy_(shard, non_blocking=True)
        return arrived


def peer_runs(rank: int, size: int, merged: bool) -> list[range]:
    """A rank's peers, from the next one on around: one by one, or as the at most two runs of neighbours."""
    if merged:
        return [run for run in (range(rank + 1, size), range(rank)) if run]
    return [range(peer, peer + 1) for peer in (*range(rank + 1, size), *range(rank))]


def _rows(chunks: tuple[Tensor, ...], run: range) -> Tensor:
    """Neighbouring chunks of a matrix as one view of it."""
    first = chunks[run.start]
    return first.as_strided((len(first) * len(run), first.shape[1]), first.stride())
