"""The overlap by hand: a ring of sends beside the products, and products in pieces beside their reductions."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.workloads.tp_block.schedule import Pending, SequentialSchedule


class RingSchedule(SequentialSchedule):
    """Transfers run on a stream of their own (on a CPU: the backend's threads), products on the current one.

    The rows of a reduction must divide by size^2: each owner's rows are reduced in `size` pieces, so that only the
    last piece's reduction has no product beside it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.divisor = self.size**2
        self.side: torch.cuda.Stream | None = None
        # P2P and reduce name ranks of the world, whatever the group.
        self.world_rank = [dist.get_global_rank(group, rank) for rank in range(self.size)]

    def gather_matmul(self, shard: Tensor, matrix: Tensor, *, keep: bool = True) -> tuple[Tensor, Tensor]:
        """Each step passes on what the last one received, before the product that runs beside the transfer. On a GPU
        the transfers wait for each other alone, so that they run ahead where products take longer."""
        side = self._transfers(shard.device)
        whole = shard.new_empty(self.size * len(shard), shard.shape[1])
        product = shard.new_empty(len(whole), matrix.shape[1])
        chunks, products = whole.chunk(self.size), product.chunk(self.size)
        chunks[self.rank].copy_(shard)
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
        for step in range(self.size):
            source = (self.rank - step) % self.size
            with torch.cuda.stream(side):
                moving = self._pass_on(chunks[source], chunks[source - 1]) if step < self.size - 1 else []
            torch.mm(chunks[source], matrix, out=products[source])
            with torch.cuda.stream(side):
                for each in moving:
                    each.wait()
            if side is not None:
                torch.cuda.current_stream().wait_stream(side)
        return whole, product

    def matmul_scatter(self, whole: Tensor, matrix: Tensor, *, awaited: bool = False) -> Pending:
        """Pieces go to their owners by `reduce`, in the same order on all ranks (as collectives must); the owners take
        turns, so that no rank receives twice in a row. What is sent is kept until it has been."""
        if len(whole) % self.divisor:
            raise ValueError(f"{len(whole)} rows must divide by {self.divisor}, the square of the ranks, to overlap")
        mine = whole.new_empty(len(whole) // self.size, matrix.shape[1])
        chunks, pieces = whole.chunk(self.size), mine.chunk(self.size)
        sent: list[tuple[Any, Tensor]] = []
        for piece in range(self.size):
            for owner in range(self.size):
                rows = chunks[owner].chunk(self.size)[piece]
                partial = pieces[piece] if owner == self.rank else torch.empty_like(pieces[piece])
                torch.mm(rows, matrix, out=partial)
                work = dist.reduce(partial, dst=self.world_rank[owner], group=self.group, async_op=True)
                sent.append((work, partial))

        def finish() -> Tensor:
            for work, _ in sent:
                work.wait()
            sent.clear()
            return mine

        return finish

    def _transfers(self, device: torch.device) -> torch.cuda.Stream | None:
        if self.side is None and device.type == "cuda":
            self.side = torch.cuda.Stream(device)
        return self.side

    def _pass_on(self, leaving: Tensor, arriving: Tensor) -> list[Any]:
        after, before = self.world_rank[(self.rank + 1) % self.size], self.world_rank[self.rank - 1]
        send = dist.P2POp(dist.isend, leaving, after, self.group)
        receive = dist.P2POp(dist.irecv, arriving, before, self.group)
        return list(dist.batch_isend_irecv([send, receive]))
