"""torch's fused products and collectives through symmetric memory: peer copies beside products of chunks."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.comm.parallel_linears import Pending, SequentialSchedule
from tpbench.comm.symmetric_buffers import enable_symmetric_memory


@dataclass(frozen=True)
class TorchWorkspace:
    """torch's symmetric memory for the fused operations of one group, by the group's name."""

    name: str

    @property
    def gib(self) -> float:
        """The memory that this rank holds in GiB, 0 before the first operation."""
        library: Any = importlib.import_module("torch.distributed._symmetric_memory")
        memory = getattr(library, "_group_name_to_workspace_tensor", {}).get(self.name)
        return 0.0 if memory is None else memory.nbytes / 2**30


class SymmMemSchedule(SequentialSchedule):
    """torch.ops.symm_mem.fused_all_gather_matmul and fused_matmul_reduce_scatter, without NVLink multicast."""

    memory_is_permanent = True
    """torch never frees its workspace, even when this schedule is gone."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.name = enable_symmetric_memory(group)
        self.memory = TorchWorkspace(self.name)
        self.operations: Any = torch.ops.symm_mem

    def gather_matmul(self, shard: Tensor, matrix: Tensor, *, keep: bool = True) -> tuple[Tensor, Tensor]:
        whole, products = self.operations.fused_all_gather_matmul(shard, [matrix], 0, self.name)
        return whole, products[0]

    def matmul_scatter(self, whole: Tensor, matrix: Tensor, *, awaited: bool = False) -> Pending:
        summed = self.operations.fused_matmul_reduce_scatter(whole, matrix, "sum", 0, self.name)
        return lambda: summed
