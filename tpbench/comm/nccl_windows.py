"""Process groups whose all-gathers NCCL runs on buffers in its symmetric windows, by its kernels or by copy engines.

Both tensors of an all-gather must lie in windows, at equal offsets on all ranks. With NCCL_NVLS_ENABLE=0 NCCL 2.28 uses
no multicast for them: it masks its multimem kernels out, and copy engines signal peers one by one.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
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
        self.buffers: dict[int, list[Tensor]] = defaultdict(list)

    @property
    def gib(self) -> float:
        """Memory of all buffers on this rank, in GiB."""
        return sum(nbytes * len(buffers) for nbytes, buffers in self.buffers.items()) / 2**30

    def new_empty(self, shape: Sequence[int], *, dtype: torch.dtype, **_: Any) -> Tensor:
        """Return a tensor in a window with undefined content. Collective if no buffer of its size is free."""
        nbytes = max(SMALLEST, -(-math.prod(shape) * dtype.itemsize // SEGMENT) * SEGMENT)
        buffer = next(filter(_is_free, self.buffers[nbytes]), None)
        if buffer is None:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError("NCCL's windows must be made before a CUDA graph is captured: run a step first")
            with torch.cuda.use_mem_pool(self.pool):
                buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            self.buffers[nbytes].append(buffer)
        tensor: Any = torch.empty(0, dtype=dtype, device=self.device)  # a view could not be a function's result
        return tensor.set_(buffer.untyped_storage(), 0, tuple(shape))  # type: ignore[no-any-return]


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


def nccl_algorithm(collective: Callable[[], object]) -> str:
    """Return the names of NCCL's kernels for a collective, or that copy engines run it. Collective."""
    collective()  # a graph cannot make windows
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        collective()
    with tempfile.TemporaryDirectory() as folder:
        graph.debug_dump(f"{folder}/graph.dot")
        return algorithm_in(Path(folder, "graph.dot").read_text())


def algorithm_in(graph: str) -> str:
    """Return the same from the description of a CUDA graph."""
    kernels = re.findall(r"nccl(Symk)?DevKernel_(\w+?)\d\dnccl", graph)
    # The last part of other kernels' names, a protocol, is always LL.
    names = [f"symmetric {name}" if symmetric else name.removesuffix("_LL") for symmetric, name in kernels]
    return ", ".join(names) or ("copy engine" if "BATCH_MEM_OP" in graph else "unknown")
