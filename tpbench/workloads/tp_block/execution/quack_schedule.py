"""QuACK's overlapped all-gather: one persistent product, whose tiles wait on the GPU for the shard that they read.

https://github.com/Dao-AILab/quack, `quack.distributed`. Copy engines push each rank's shard to its peers, and a flag
behind it. QuACK has no reduce-scatter: that of this schedule is the plain one.
`tpbench/docs/tp_block.md` says which tiles were tried.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.comm.parallel_linears import Pending, SequentialSchedule
from tpbench.comm.symmetric_buffers import enable_symmetric_memory
from tpbench.workloads.tp_block.problem import QUACK_ROWS

TILE_COLUMNS = 256
"""Columns of a tile."""


class QuackSchedule(SequentialSchedule):
    """All-gathers with a product are QuACK's, all other collectives the plain ones.

    Shards of one shape share a pair of symmetric buffers, which alternate. A gathered tensor that is kept is therefore
    copied. One that is not kept stays in its buffer: a peer overwrites it only after it has received this rank's shard
    of the next gather, which this rank sends after it has used the tensor. Between the replays of a graph with only one
    such gather, the plain reduce-scatter of the same step orders the two.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Import QuACK. Raise RuntimeError if the GPU is older than it needs."""
        super().__init__(group)
        if torch.cuda.get_device_capability() < (9, 0):
            raise RuntimeError("QuACK's overlapped all-gather needs a GPU of compute capability 9.0 or later")
        enable_symmetric_memory(group)
        self.gather_runner: Any = importlib.import_module("quack.distributed").AllGatherRunner
        self.product: Any = importlib.import_module("quack.gemm").gemm
        self.runners: dict[tuple[torch.Size, torch.dtype], Any] = {}
        """The buffers, flags and streams for shards of each shape. All ranks make them at the first use."""

    @property
    def gib(self) -> float:
        """The symmetric memory of the gathered tensors that this rank holds, in GiB."""
        return sum(runner.bufs.nbytes for runner in self.runners.values()) / 2**30

    def gather_matmul(self, shard: Tensor, matrix: Tensor, *, keep: bool = True) -> tuple[Pending, Tensor]:
        key = shard.shape, shard.dtype
        if key not in self.runners:
            self.runners[key] = self.gather_runner(*shard.shape, shard.dtype, self.group, shard.device)
        product = shard.new_empty(self.size * len(shard), matrix.shape[1])
        clusters = 1 if len(shard) % (2 * QUACK_ROWS) else 2, 1
        with self.runners[key].gather(shard) as (whole, arrivals):
            tiles = QUACK_ROWS, TILE_COLUMNS, *clusters
            self.product(whole, matrix, product, None, None, *tiles, b_kn=True, ag_args=arrivals)
            if keep:  # within the context, which ends with the signal that the buffer has been read
                whole = whole.clone()
        return lambda: whole, product
