"""Overlap with torch's means: by hand with its collectives, and by its fused products through symmetric memory."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.comm.parallel_linears import Pending, SequentialSchedule
from tpbench.comm.symmetric_buffers import enable_symmetric_memory


class RingSchedule(SequentialSchedule):
    """Transfers run on a separate stream (on a CPU: in the backend's threads), products on the current stream.

    The rows of a reduction must be divisible by size^2: each owner's rows are reduced in `size` pieces. So only the
    reduction of the last piece has no product beside it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.transfers: torch.cuda.Stream | None = None
        # P2P operations and reduce take ranks of the world, in any group.
        self.world_rank = [dist.get_global_rank(group, rank) for rank in range(self.size)]

    def gather_matmul(self, shard: Tensor, matrix: Tensor, *, keep: bool = True) -> tuple[Pending, Tensor]:
        """Send in each step the chunk that the last step received, before the product that runs beside the transfer.

        On a GPU transfers wait only for each other, so that they run ahead if products take longer.
        """
        if self.transfers is None and shard.is_cuda:
            self.transfers = torch.cuda.Stream(shard.device)
        stream = self.transfers
        whole = shard.new_empty(self.size * len(shard), shard.shape[1])
        product = shard.new_empty(len(whole), matrix.shape[1])
        chunks, products = whole.chunk(self.size), product.chunk(self.size)
        following, previous = self.world_rank[(self.rank + 1) % self.size], self.world_rank[self.rank - 1]
        chunks[self.rank].copy_(shard)
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        for step in range(self.size):
            source = (self.rank - step) % self.size
            with torch.cuda.stream(stream):
                transfers: list[Any] = []
                if step < self.size - 1:
                    send = dist.P2POp(dist.isend, chunks[source], following, self.group)
                    receive = dist.P2POp(dist.irecv, chunks[source - 1], previous, self.group)
                    transfers = dist.batch_isend_irecv([send, receive])
            torch.mm(chunks[source], matrix, out=products[source])
            with torch.cuda.stream(stream):
                for transfer in transfers:
                    transfer.wait()
            if stream is not None:
                torch.cuda.current_stream().wait_stream(stream)
        return lambda: whole, product

    def matmul_scatter(self, whole: Tensor, matrix: Tensor, *, awaited: bool = False) -> Pending:
        """Multiply in pieces, and reduce each piece to its owner beside the products of the next ones.

        All ranks reduce in the same order, as collectives require. Owners alternate, so that no rank receives twice in
        a row. A piece that is sent stays in memory until its reduction ends.
        """
        if len(whole) % self.size**2:
            raise ValueError(f"{len(whole)} rows must be divisible by {self.size**2}, the ranks squared, to overlap")
        summed = whole.new_empty(len(whole) // self.size, matrix.shape[1])
        chunks, own_pieces = whole.chunk(self.size), summed.chunk(self.size)
        reductions: list[tuple[Any, Tensor]] = []
        for piece in range(self.size):
            for owner in range(self.size):
                rows = chunks[owner].chunk(self.size)[piece]
                partial = own_pieces[piece] if owner == self.rank else torch.empty_like(own_pieces[piece])
                torch.mm(rows, matrix, out=partial)
                work = dist.reduce(partial, dst=self.world_rank[owner], group=self.group, async_op=True)
                reductions.append((work, partial))

        def finish() -> Tensor:
            for work, _ in reductions:
                work.wait()
            reductions.clear()
            return summed

        return finish


class SymmMemSchedule(SequentialSchedule):
    """torch.ops.symm_mem.fused_all_gather_matmul and fused_matmul_reduce_scatter, without NVLink multicast."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.name = enable_symmetric_memory(group)
        self.operations: Any = torch.ops.symm_mem

    @property
    def gib(self) -> float:
        """The workspace of torch's operations on this rank in GiB, 0 before the first one. torch never frees it."""
        library: Any = importlib.import_module("torch.distributed._symmetric_memory")
        memory = getattr(library, "_group_name_to_workspace_tensor", {}).get(self.name)
        return 0.0 if memory is None else memory.nbytes / 2**30

    def gather_matmul(self, shard: Tensor, matrix: Tensor, *, keep: bool = True) -> tuple[Pending, Tensor]:
        whole, products = self.operations.fused_all_gather_matmul(shard, [matrix], 0, self.name)
        return lambda: whole, products[0]

    def matmul_scatter(self, whole: Tensor, matrix: Tensor, *, awaited: bool = False) -> Pending:
        summed = self.operations.fused_matmul_reduce_scatter(whole, matrix, "sum", 0, self.name)
        return lambda: summed
