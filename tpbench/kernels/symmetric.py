"""Memory that all ranks of a group can write to, for the exchange inside a kernel."""

from __future__ import annotations

import functools
import importlib
import os
import socket
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tpbench.kernels.one_pass.workspace import Workspace, stream_of

MOST_RANKS = 16
ENVIRONMENT = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
"""No NVLink multicast: a process that dies with a multicast object mapped can leave the fabric unusable for others."""


_rendezvous = 0
"""How many this process has made here."""


class PeerWorkspace(Workspace):
    """One a group, for launches in the same order on all its ranks, as for a collective.

    And as with a collective's, no kernel that waits for another rank may run beside this one on another stream: each
    may hold the multiprocessors that the other's peer waits for.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(device)
        self.group = group
        self._stream: torch.cuda.Stream | None = None
        self._handle = -1
        """Of that stream: of the last launch outside of graphs."""
        self._kept: list[Any] = []

    def enter(self) -> None:
        """Before each launch: after the last one, whatever its stream, since both count with the same epoch."""
        super().enter()
        handle = stream_of(self.device)
        if handle != self._handle and not torch.cuda.is_current_stream_capturing():
            stream = torch.cuda.current_stream(self.device)
            if self._stream is not None:
                stream.wait_stream(self._stream)
            self._stream, self._handle = stream, handle

    def _allocate(self, half: int) -> None:
        """Collective. Earlier buffers are kept: captured graphs may hold their addresses."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "exchange='symmetric' must make its buffers before a CUDA graph is captured: call entropy_loss with "
                "these shapes first"
            )
        global _rendezvous
        forbid_multicast()
        symmetric: Any = importlib.import_module("torch.distributed._symmetric_memory")
        buffer = symmetric.empty(2 * half, dtype=torch.int64, device=self.device)
        buffer.zero_()
        # No peer learns the address before it is zero.
        torch.cuda.synchronize(self.device)
        handle = symmetric.rendezvous(buffer, self.group)
        _rendezvous += 1
        offset = getattr(handle, "offset", 0)
        self.words = buffer
        self.peers = torch.tensor(
            [pointer + offset for pointer in handle.buffer_ptrs], dtype=torch.int64, device=self.device
        )
        self._kept.append((buffer, handle, self.peers))


def forbid_multicast() -> None:
    """Set what turns NVLink multicast off where it is not set, and RuntimeError where it is set otherwise."""
    for name, value in ENVIRONMENT.items():
        if os.environ.setdefault(name, value) != value:
            raise RuntimeError(f"symmetric memory needs {name}={value}, it is {os.environ[name]}")


@functools.lru_cache(maxsize=64)
def workspace(group: dist.ProcessGroup, device: torch.device) -> PeerWorkspace | str:
    """The group's workspace, or why it has none. Collective on first use; the same kind of answer on all ranks."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "ranks must meet before a CUDA graph is captured: call entropy_loss with this group first, or say "
            "exchange='nccl'"
        )
    reason = why_not(_everybodys((_obstacle(group, device), socket.gethostname(), _boot_id(), _rendezvous), group))
    if reason:
        return reason
    made = PeerWorkspace(group, device)
    try:
        made.reserve(1 << 16)
    except Exception as error:  # whatever it is, the others wait to hear of it
        reason = f"symmetric memory failed: {type(error).__name__}: {error}"
    return next(filter(None, _everybodys(reason, group)), made)


def _everybodys(value: Any, group: dist.ProcessGroup) -> list[Any]:
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, value, group=group)
    return answers


def why_not(answers: Sequence[tuple[str, str, str, int]]) -> str:
    """The reason for all ranks, empty if there is none, from each one's: obstacle, host, boot, rendezvous made."""
    obstacles, hosts, boots, made = zip(*answers, strict=True)
    if any(obstacles):
        return str(next(filter(None, obstacles)))
    if len(set(zip(hosts, boots, strict=True))) > 1:
        return "the ranks are on several nodes"
    if len(set(made)) > 1:
        # torch numbers its messages by process, not by group: with unequal numbers they would wait for each other.
        return f"its ranks have set up symmetric memory unequally often before, in other groups ({made})"
    return ""


def _obstacle(group: dist.ProcessGroup, device: torch.device) -> str:
    """Why this rank cannot take part; empty if it can."""
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


def _boot_id() -> str:
    """What tells containers of one machine, which can share memory, from machines of one name."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:  # noqa: PTH123
            return file.read().strip()
    except OSError:
        return ""
