"""Process groups whose collectives NCCL runs by copy engines or symmetric kernels, on buffers in its symmetric windows.

A rank may write to, and read from, the window of a peer, so that NCCL needs no buffers of its own in between. NCCL can
tell neither from the tensors of others: both tensors of a collective must lie in windows, at equal offsets on all
ranks. `new_empty` makes such tensors. NCCL uses no multicast for them as long as NCCL_NVLS_ENABLE=0: it then masks its
multimem kernels out, and its copy engines signal peers one by one (NCCL 2.28.9, sym_kernels.cc and ce_coll.cc).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.kernels.collectives import forbid_multicast

Nccl = Literal["default", "symmetric", "copy_engine"]
"""default: NCCL's choice. symmetric: buffers in windows. copy_engine: the same with NCCL_CTA_POLICY_ZERO, by which copy
engines gather. They cannot add, so symmetric kernels reduce."""

SEGMENT = 2**21
SMALLEST = 5 * SEGMENT
"""Bytes of a buffer: so many or a larger multiple of `SEGMENT`, for which torch's allocator makes a new segment, and so
NCCL a new window. Parts of a segment would lie at offsets that depend on addresses, which differ between ranks."""

windows_of: dict[dist.ProcessGroup, Windows] = {}
"""The windows of each group that `group_with_windows` made."""


class Windows:
    """Buffers in the symmetric windows of a group. They are kept as long as the process.

    A buffer is used again when no tensor refers to it. So all ranks must make and free their tensors in the same order.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Register the windows. Collective."""
        self.device = device
        dist.all_reduce(torch.zeros(1, device=device), group=group)  # makes the communicator
        backend: Any = group._get_backend(device)
        self.pool = torch.cuda.MemPool(backend.mem_allocator)
        backend.register_mem_pool(self.pool, symm=True)
        self.buffers: dict[tuple[str, int], list[Tensor]] = defaultdict(list)

    @property
    def gib(self) -> float:
        """Memory of all buffers on this rank, in GiB."""
        return sum(buffer.nbytes for buffers in self.buffers.values() for buffer in buffers) / 2**30

    def new_empty(self, shape: Sequence[int], *, dtype: torch.dtype, use: str = "", **_: Any) -> Tensor:
        """Return a tensor in a window with undefined content. Collective if no buffer of its size is free.

        Tensors for streams that do not wait for each other need names of their `use`: they share no buffers.
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
        # Not a view for autograd, which would forbid to return one from a function.
        tensor: Any = torch.empty(0, dtype=dtype, device=self.device)
        return tensor.set_(buffer.untyped_storage(), 0, tuple(shape))  # type: ignore[no-any-return]

    def holds(self, tensor: Tensor) -> bool:
        """Return true if the tensor lies in a window."""
        start = tensor.untyped_storage().data_ptr()
        return any(buffer.data_ptr() == start for buffers in self.buffers.values() for buffer in buffers)


def _is_free(buffer: Tensor) -> bool:
    """Return true if no other tensor refers to the buffer's memory. (Python's wrapper of the storage counts as one.)"""
    return torch._C._storage_Use_Count(buffer.untyped_storage()._cdata) == 2


def group_with_windows(ranks: list[int], nccl: Nccl, device: torch.device) -> dist.ProcessGroup:
    """Return a new group of these ranks. Those of a single rank have no windows. Collective over all ranks."""
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
