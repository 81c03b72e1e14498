"""Process groups whose collectives NCCL runs on buffers in its symmetric windows, which peers read and write directly.

Both tensors of a collective must lie in windows, at equal offsets on all ranks; `new_empty` makes such tensors. With
NCCL_NVLS_ENABLE=0 NCCL 2.28 uses no multicast for them: it masks its multimem kernels out (sym_kernels.cc), and copy
engines signal peers one by one (ce_coll.cc).
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

SEGMENT, SMALLEST = 2**21, 10 * 2**20
"""Buffers have multiples of SEGMENT bytes, and at least SMALLEST: torch's allocator makes a new segment for each, and
NCCL a window. Parts of a segment would lie at offsets that depend on addresses, which differ between ranks."""

windows_of: dict[dist.ProcessGroup, Windows] = {}
"""The windows of each group that `group_with_windows` made, as long as the process."""


class Windows:
    """Buffers in the symmetric windows of a group. A buffer is used again when no tensor refers to it.

    So all ranks must make and free their tensors in the same order.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        dist.all_reduce(torch.zeros(1, device=device), group=group)  # makes the communicator
        backend: Any = group._get_backend(device)
        self.device, self.pool = device, torch.cuda.MemPool(backend.mem_allocator)
        backend.register_mem_pool(self.pool, symm=True)
        self.buffers: dict[tuple[str, int], list[Tensor]] = defaultdict(list)

    @property
    def gib(self) -> float:
        """Memory of all buffers on this rank, in GiB."""
        return sum(buffer.nbytes for buffers in self.buffers.values() for buffer in buffers) / 2**30

    def new_empty(self, shape: Sequence[int], *, dtype: torch.dtype, use: str = "", **_: Any) -> Tensor:
        """Return a tensor in a window with undefined content. Collective if no buffer of its size is free.

        Streams that do not wait for each other need different names of the `use`, which share no buffers.
        """
        nbytes = max(SMALLEST, -(-math.prod(shape) * dtype.itemsize // SEGMENT) * SEGMENT)
        buffers = self.buffers[use, nbytes]
        buffer = next(filter(_is_free, buffers), None)
        if buffer is None:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError("NCCL's windows must be made before a CUDA graph is captured: run a step first")
            with torch.cuda.use_mem_pool(self.pool):
                buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            buffers.append(buffer)
        tensor: Any = torch.empty(0, dtype=dtype, device=self.device)  # a view could not be a function's result
        return tensor.set_(buffer.untyped_storage(), 0, tuple(shape))  # type: ignore[no-any-return]

    def holds(self, tensor: Tensor) -> bool:
        """Return true if the tensor lies in a window."""
        start = tensor.untyped_storage().data_ptr()
        return any(buffer.data_ptr() == start for buffers in self.buffers.values() for buffer in buffers)


def _is_free(buffer: Tensor) -> bool:
    """Return true if only the buffer itself and Python's wrapper of its memory refer to the memory."""
    return torch._C._storage_Use_Count(buffer.untyped_storage()._cdata) == 2


def group_with_windows(ranks: list[int], nccl: str, device: torch.device) -> dist.ProcessGroup:
    """Return a new group with windows, if it has several ranks. `nccl`: symmetric or copy_engine. Collective."""
    forbid_multicast()
    library: Any = dist.ProcessGroupNCCL
    options = library.Options()
    options._timeout = dist.distributed_c10d.default_pg_timeout  # that of other groups
    if nccl == "copy_engine":
        options.config.cta_policy = library.NCCL_CTA_POLICY_ZERO
    group: dist.ProcessGroup = dist.new_group(ranks, pg_options=options)
    if dist.get_rank() in ranks and len(ranks) > 1:
        windows_of[group] = Windows(group, device)
    return group
