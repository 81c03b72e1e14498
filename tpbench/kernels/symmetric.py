"""Symmetric memory of a group: memory that all its ranks can write to, for the exchange inside a kernel."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tpbench.kernels.collectives import gather_values, machine_id, same_machine
from tpbench.kernels.one_pass.workspace import Workspace, stream_of

MOST_RANKS = 16
ENVIRONMENT = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
"""These variables turn NVLink multicast off: a process that dies with a multicast object mapped can leave the fabric
unusable for other processes."""


_rendezvous_count = 0
"""Rendezvous of symmetric memory that this process has completed in this module."""


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

        Only addresses are needed, so torch's public functions serve: a buffer may begin at an offset in its handle's
        memory. `comm.symmetric_buffers` copies through the handle and allocates in another way.
        """
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "exchange='symmetric' must make its buffers before a CUDA graph is captured: call entropy_loss with "
                "these shapes first"
            )
        global _rendezvous_count
        forbid_multicast()
        symmetric: Any = importlib.import_module("torch.distributed._symmetric_memory")
        buffer = symmetric.empty(2 * half, dtype=torch.int64, device=self.device)
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


def forbid_multicast() -> None:
    """Set the variables that turn NVLink multicast off. Raises RuntimeError if one is already set otherwise."""
    for name, value in ENVIRONMENT.items():
        if os.environ.setdefault(name, value) != value:
            raise RuntimeError(f"symmetric memory needs {name}={value}, it is {os.environ[name]}")


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
    reason = unavailable_reason(
        gather_values((_rank_reason(group, device), *machine_id(), _rendezvous_count), group, device)
    )
    if reason:
        return reason
    created = PeerWorkspace(group, device)
    try:
        created.reserve(1 << 16)
    except Exception as error:  # an error of any kind: the other ranks wait for the answer
        reason = f"symmetric memory failed: {type(error).__name__}: {error}"
    return next(filter(None, gather_values(reason, group, device)), created)


def unavailable_reason(answers: Sequence[tuple[str, str, str, int]]) -> str:
    """Return the reason for all ranks why the group has no symmetric memory. Empty: it has.

    answers: of each rank its own reason, its host, the boot of the host, and its number of rendezvous.
    """
    reasons, hosts, boots, counts = zip(*answers, strict=True)
    if any(reasons):
        return str(next(filter(None, reasons)))
    if not same_machine(zip(hosts, boots, strict=True)):
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
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    try:
        importlib.import_module("torch.distributed._symmetric_memory")
        forbid_multicast()
    except (ImportError, RuntimeError) as error:
        return str(error)
    return ""
