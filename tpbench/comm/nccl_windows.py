"""Process groups whose all-gathers NCCL runs on buffers in its symmetric windows, by its kernels or by copy engines.

Both tensors of an all-gather must lie in windows, at equal offsets on all ranks. With NCCL_NVLS_ENABLE=0 NCCL 2.28 uses
no multicast for them: it masks its multimem kernels out, and copy engines signal peers one by one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.kernels.collectives import forbid_multicast

windows_of: dict[dist.ProcessGroup, Windows] = {}
"""The windows of each group that `group_with_windows` made, as long as the process."""


class Windows:
    """Buffers in the windows of a group, used again when no tensor refers to them: all ranks make and free alike."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        dist.all_reduce(torch.zeros(1, device=device), group=group)  # makes the communicator
        backend: Any = group._get_backend(device)
        self.device, self.pool = device, torch.cuda.MemPool(backend.mem_allocator)
        backend.register_mem_pool(self.pool, symm=True)
        self.buffers: dict[int, list[Tensor]] = defaultdict(list)
        self.gib = 0.0  # of all buffers on this rank

    def new_empty(self, shape: Sequence[int], *, dtype: torch.dtype, **_: Any) -> Tensor:
        """Return a tensor in a window with undefined content. Collective if no buffer of its size is free."""
        # Of so many bytes, each buffer is a segment of torch's allocator, and so a window: offsets are 0 on all ranks.
        nbytes = max(10 * 2**20, -(-math.prod(shape) * dtype.itemsize // 2**21) * 2**21)
        for buffer in self.buffers[nbytes]:  # a free one has only itself and Python's wrapper of its memory
            if torch._C._storage_Use_Count(buffer.untyped_storage()._cdata) == 2:
                break
        else:
            with torch.cuda.use_mem_pool(self.pool):
                buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            self.buffers[nbytes].append(buffer)
            self.gib += nbytes / 2**30
        tensor: Any = torch.empty(0, dtype=dtype, device=self.device)  # a view could not be a function's result
        return tensor.set_(buffer.untyped_storage(), 0, tuple(shape))  # type: ignore[no-any-return]


def group_with_windows(ranks: list[int], nccl: str, device: torch.device) -> dist.ProcessGroup:
    """Return a new group with windows, if it has several ranks. `nccl`: symmetric or copy_engine. Collective."""
    forbid_multicast()
    options: Any = dist.ProcessGroupNCCL.Options()
    if nccl == "copy_engine":
        options.config.cta_policy = 2  # NCCL_CTA_POLICY_ZERO
    group: dist.ProcessGroup = dist.new_group(ranks, pg_options=options)
    if dist.get_rank() in ranks and len(ranks) > 1:
        windows_of[group] = Windows(group, device)
    return group
