"""Collectives for whole tensors, rows, columns, tokens and Python objects, and how to differentiate them.

The all-gathers of a group with windows run on buffers that NCCL's kernels or copy engines read and write directly. Both
tensors must lie in such symmetric windows, at equal offsets on all ranks. With NCCL_NVLS_ENABLE=0 NCCL 2.28 uses no
multicast for them: it masks its multimem kernels out, and copy engines signal peers one by one.
"""

import inspect
import math
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import Tensor, nn

from tpbench.kernels.distributed import all_gather as all_gather
from tpbench.kernels.distributed import forbid_multicast, gather_values, machine_id
from tpbench.kernels.distributed import reduce_scatter as reduce_scatter

windows_of: dict[dist.ProcessGroup, "Windows"] = {}
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
        # A buffer of this size is a segment of torch's allocator, and so a window: its offset is 0 on all ranks.
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


def gather_rows(shard: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return (size * rows, n): the (rows, n) shards of all ranks, in rank order. Collective.

    In compiled code this and `scatter_rows` are functional collectives, which the compiler can move or fuse.
    """
    if torch.compiler.is_compiling():
        return functional_collectives.all_gather_tensor(shard, 0, group)
    windows = windows_of.get(group)
    whole = (windows or shard).new_empty((group.size() * len(shard), shard.shape[1]), dtype=shard.dtype)
    if windows is None:
        all_gather(whole, shard.contiguous(), group=group)
    else:  # in place, as the shard must lie in a window, and on NCCL's stream: copy engines refuse the default one
        part = whole.chunk(group.size())[group.rank()].copy_(shard)
        all_gather(whole, part, group=group, async_op=True).wait()
    return whole


def scatter_rows(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum the (rows, n) matrices of all ranks and return this rank's (rows / size, n) of the sum. Collective."""
    if torch.compiler.is_compiling():
        return functional_collectives.reduce_scatter_tensor(whole, "sum", 0, group)
    shard = whole.new_empty(len(whole) // group.size(), whole.shape[1])
    reduce_scatter(shard, whole.contiguous(), group=group)
    return shard


Exchange: TypeAlias = Callable[[Tensor, dist.ProcessGroup], Tensor]
"""Exchanges a tensor between the ranks of a group."""


def exchanged(tensor: Tensor, group: dist.ProcessGroup, forward: Exchange, backward: Exchange) -> Tensor:
    """Return `forward(tensor, group)`, whose gradient is `backward` of the result's gradient."""
    return _Exchanged.apply(tensor, group, forward, backward)


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any, forward: Exchange, backward: Exchange) -> Tensor:
        ctx.group, ctx.exchange = group, backward
        return forward(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.exchange(gradients[0], ctx.group), None, None, None


@dataclass(frozen=True)
class TokenExchange:
    """All-gather and reduce-scatter of a micro-batch's tokens, for layers with sequence parallelism.

    A rank holds its share of a micro-batch's tokens, (1, batch * sequence / ranks, width). The shares in rank order are
    the micro-batch as it lies in memory, for any number of sequences. The ranks must divide the tokens.
    """

    group: dist.ProcessGroup
    batch_size: int
    seq_length: int

    def gather(self, share: Tensor) -> Tensor:
        """All-gather shares to all sequences, (batch, sequence, width). Backward, reduce-scatter the gradients."""
        rows = exchanged(share.flatten(0, 1), self.group, gather_rows, scatter_rows)
        return rows.view(self.batch_size, self.seq_length, -1)

    def scatter(self, partial: Tensor) -> Tensor:
        """Reduce-scatter (batch, sequence, width) to this rank's share. Backward, all-gather the gradients."""
        return exchanged(partial.flatten(0, 1), self.group, scatter_rows, gather_rows)[None]


def gather_before(block: nn.Module, gather: Callable[[Tensor], Any]) -> None:
    """Let a block compute with all tokens that is called with a rank's share of them, its first argument."""
    first = next(iter(inspect.signature(block.forward).parameters))

    def before(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if inputs:
            return (gather(inputs[0]), *inputs[1:]), named
        return inputs, {**named, first: gather(named[first])}

    block.register_forward_pre_hook(before, with_kwargs=True)


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return one value from each rank, in rank order, as JSON returns it: a tuple comes back as a list. Collective.

    The group (default: all ranks; without any process group, this rank alone) needs a backend for the CPU.
    """
    group = group or dist.group.WORLD
    return [value] if group is None else gather_values(value, group, torch.device("cpu"))


def on_one_machine(group: dist.ProcessGroup) -> bool:
    """Return true if all ranks run under one Linux kernel. Collective, with the same answer on every rank."""
    return len(set(gather_objects(machine_id(), group))) == 1


def nccl_algorithm(shape: tuple[int, int], dtype: torch.dtype, group: dist.ProcessGroup) -> str:
    """Return NCCL's kernels for an all-gather of shards, without a protocol that is always LL, or `copy engine`.

    Collective over all ranks. Returns `unknown` if a rank has no memory for it, or if this rank cannot read a graph of
    it, which other ranks don't notice: a capture communicates nothing.
    """
    try:
        shard = torch.zeros(shape, dtype=dtype, device="cuda")
        torch.empty(group.size() * shard.nbytes, dtype=torch.uint8, device="cuda")  # as much as the result
        is_full = False
    except torch.OutOfMemoryError:
        is_full = True
    if any(gather_objects(is_full)):
        return "unknown"
    gather_rows(shard, group)  # a graph cannot make windows
    text = ""
    # A failed capture leaves its stream as the current one, from which the inner context returns.
    with suppress(Exception), torch.cuda.stream(torch.cuda.current_stream()), tempfile.NamedTemporaryFile("r") as file:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        graph.enable_debug_mode()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            gather_rows(shard, group)
        graph.debug_dump(file.name)
        text = file.read()
    return algorithm_in(text)


def algorithm_in(text: str) -> str:
    """Return the names of NCCL's kernels in the text of a graph, or `copy engine` or `unknown`."""
    kernels = re.findall(r"nccl(Symk)?DevKernel_(\w+?)\d\dnccl", text)
    names = [f"symmetric {name}" if symmetric else name.removesuffix("_LL") for symmetric, name in kernels]
    return ", ".join(names) or ("copy engine" if "BATCH_MEM_OP" in text else "unknown")
