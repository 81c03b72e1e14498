"""Memory through which the programs of one launch, and of successive launches, exchange row states.

Over several ranks it is symmetric memory: all ranks of the group can write to it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from triton import next_power_of_2
from triton.runtime import driver

from tpbench.kernels.distributed import forbid_multicast, gather_values, machine_id

WAIT_LIMIT_S = 120.0
"""How long a kernel waits for a peer's statistics, which may be late because its host compiles or loads.

After that the loss is NaN, and the next call raises, as does every later call: the launches of the ranks no longer
correspond.
"""
MOST_RANKS = 16
_rendezvous_count = 0
"""Rendezvous of symmetric memory that this process has completed in this module."""


class Workspace:
    """Memory of the exchange on one GPU. `PeerWorkspace` holds memory that several ranks can write to."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.control = torch.zeros(4, dtype=torch.int32, device=device)
        """The epoch, how many programs are done, and whether a program of exchange="yielding" left rows."""
        self.failed = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        """Set by a kernel whose wait passed its limit. It lies in host memory, to be read without synchronisation."""
        self._failure = ctypes.c_int32.from_address(self.failed.data_ptr())
        """The same number. Reading it does not pass torch's dispatcher."""
        self.words = torch.empty(0, dtype=torch.int64, device=device)
        self.peers = self.words
        """(world size,) int64: addresses of all ranks' words; unused on one rank."""
        self.half = 0
        """Words of one parity."""

    def enter(self) -> None:
        """Check before each launch. Raises RuntimeError if the wait of an earlier launch passed its limit."""
        if self._failure.value:
            raise RuntimeError(
                f"an earlier entropy_loss waited {WAIT_LIMIT_S:.0f} s in vain for the statistics of another rank, "
                "which died, did not call it, or was kept from it by another stream's collective (then say "
                "exchange='yielding'): its loss is NaN, and this group can exchange no more"
            )

    def reserve(self, words: int) -> None:
        """Make room for `words` words of one parity. New memory is filled with zeros; no launch has the epoch 0."""
        if words > self.half:
            half = next_power_of_2(words)
            self._allocate(half)
            self.half = half

    def _allocate(self, half: int) -> None:
        self.words = torch.zeros(2 * half, dtype=torch.int64, device=self.device)
        self.peers = self.words


_local_workspace = functools.cache(lambda device, stream: Workspace(device))


def local_workspace(device: torch.device) -> Workspace:
    """Return the workspace of the current stream, for a vocabulary that one rank holds. Streams' launches may overlap.

    All captured graphs share one more workspace, allocated before the first capture: memory allocated in a capture
    belongs to the graph. So two graphs with this kernel must not be replayed at the same time, as with the workspaces
    of cuBLAS.
    """
    captured = _local_workspace(device, -1)
    if torch.cuda.is_current_stream_capturing():
        return captured
    return _local_workspace(device, stream_of(device))


def stream_of(device: torch.device) -> int:
    """Return the handle of the current stream as Triton gets it: a torch.cuda.Stream takes ten times as long."""
    return int(driver.active.get_current_stream(device.index))


class PeerWorkspace(Workspace):
    """The workspace of one group. All ranks must launch in the same order, as for a collective.

    As for a collective, no kernel that waits for another rank may run at the same time on another stream: each may
    hold the multiprocessors that the other's peer waits for.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(device)
        self.group = group
        self._stream: torch.cuda.Stream | None = None
        self._handle = -1
        """Handle of the stream of the last launch outside of graphs."""
        self._kept: list[Any] = []
        self.alone = False
        """True if no rank has another process group of several ranks: probably no other collective runs beside it."""

    def enter(self) -> None:
        """Order each launch after the last one, also one of another stream: both advance the same epoch."""
        super().enter()
        handle = stream_of(self.device)
        if handle != self._handle and not torch.cuda.is_current_stream_capturing():
            stream = torch.cuda.current_stream(self.device)
            if self._stream is not None:
                stream.wait_stream(self._stream)
            self._stream, self._handle = stream, handle

    def _allocate(self, half: int) -> None:
        """Allocate a buffer on all ranks (collective). Earlier buffers stay: captured graphs may hold their address.

        A buffer may begin at an offset in its handle's memory.
        """
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "exchange='symmetric' must make its buffers before a CUDA graph is captured: call entropy_loss with "
                "these shapes first"
            )
        global _rendezvous_count
        forbid_multicast()
        symmetric: Any = importlib.import_module("torch.distributed._symmetric_memory")
        # torch's `empty` does the same after it has imported sympy, which takes 3 s.
        words = 3 * half + 2 * MOST_RANKS  # for two meetings and, in the last half, for rows that are left
        buffer = symmetric._SymmetricMemory.empty_strided_p2p((words,), (1,), torch.int64, self.device)
        buffer.zero_()
        # Peers learn the address only after the memory is zero.
        torch.cuda.synchronize(self.device)
        handle = symmetric.rendezvous(buffer, self.group)
        _rendezvous_count += 1
        offset = getattr(handle, "offset", 0)
        self.words = buffer
        self.peers = torch.tensor(
            [pointer + offset for pointer in handle.buffer_ptrs], dtype=torch.int64, device=self.device
        )
        self._kept.append((buffer, handle, self.peers))


@functools.lru_cache(maxsize=64)
def workspace(group: dist.ProcessGroup, device: torch.device) -> PeerWorkspace | str:
    """Return the workspace of a group, or the reason why it has none.

    The first call is collective. Either all ranks get a workspace, or all get a reason.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "ranks must meet before a CUDA graph is captured: call entropy_loss with this group first, or say "
            "exchange='nccl'"
        )
    n_groups = sum(each.size() > 1 for each in dist.distributed_c10d._world.pg_map)
    answers = gather_values((_rank_reason(group, device), machine_id(), _rendezvous_count, n_groups), group, device)
    reason = unavailable_reason([answer[:3] for answer in answers])
    if reason:
        return reason
    created = PeerWorkspace(group, device)
    created.alone = all(answer[3] == 1 for answer in answers)
    try:
        created.reserve(1 << 16)
    except Exception as error:  # an error of any kind: the other ranks wait for the answer
        reason = f"symmetric memory failed: {type(error).__name__}: {error}"
    return next(filter(None, gather_values(reason, group, device)), created)


def unavailable_reason(answers: Sequence[tuple[str, str, int]]) -> str:
    """Return the reason for all ranks why the group has no symmetric memory. Empty: it has.

    answers: of each rank its own reason, its `machine_id`, and its number of rendezvous.
    """
    reasons, machines, counts = zip(*answers, strict=True)
    if any(reasons):
        return str(next(filter(None, reasons)))
    if len(set(machines)) > 1:
        return "the ranks are on several nodes"
    if len(set(counts)) > 1:
        # torch numbers its messages by process, not by group: ranks with unequal numbers would wait for each other.
        return f"its ranks have set up symmetric memory unequally often before, in other groups ({counts})"
    return ""


def _rank_reason(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the reason why this rank cannot take part. Empty: it can."""
    if device.type != "cuda":
        return "the logits are not on CUDA devices"
    if dist.get_world_size(group) > MOST_RANKS:
        return f"the group has more than {MOST_RANKS} ranks"
    if "nccl" not in str(dist.get_backend_config(group)):  # a group may have another backend for CPU tensors
        return "the group's backend is not NCCL"
    try:
        importlib.import_module("torch.distributed._symmetric_memory")
        forbid_multicast()
    except (ImportError, RuntimeError) as error:
        return str(error)
    return ""
