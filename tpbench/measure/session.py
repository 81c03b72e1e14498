"""Where a rank stands: what a worker hands to a workload."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Context:
    """A rank's place in the (dp, tp) mesh. Ranks are row-major: tp is the fastest dimension."""

    rank: int
    world_size: int
    tp_rank: int
    tp_size: int
    dp_rank: int
    dp_size: int
    tp_group: ProcessGroup
    """The ranks of this replica. Holds CPU tensors through gloo and, on GPUs, CUDA tensors through NCCL."""
    dp_group: ProcessGroup
    """The ranks of all replicas with this tp_rank."""
    device: torch.device
    folder: Path = Path()
    """Where a rank may leave a file that belongs to the job: beside its logs."""
    say: Callable[[str], None] = lambda what: None
    """A line on stderr, for whoever watches the job."""


@dataclass(frozen=True)
class Costs:
    """What one iteration cannot avoid on the busiest rank, by count."""

    bytes_moved: int
    """Bytes through that rank's memory: each input read once, each output written once."""
    bytes_communicated: int
    """Bytes that the variant as it is sends from that rank."""
    flops: int = 0
    compute_ms: float = 0.0
    """Time that the FLOPs take at a rate measured on this machine: the floor where it is longer than the rest of it."""
    wire_ms: float = 0.0
    """Time that the communication which cannot be avoided takes at a bandwidth measured on this machine: the floor's
    part of a workload that is about the wire."""


@dataclass(frozen=True)
class Verdict:
    """What the oracle says of one iteration's result."""

    columns: dict[str, Any]
    """loss_value, loss_error, grad_error, and whatever else the workload's rows show of it."""
    wrong: str | None
    """Why the result is not right, or None. The same on every rank."""


class Session(Protocol):
    """A workload's variant set up on one rank, ready to run."""

    @property
    def costs(self) -> Costs:
        """Of an iteration. Asked for after one."""

    def step(self) -> None:
        """One whole iteration on this rank. The result stays where `check` finds it."""

    def release(self) -> None:
        """Let go of the last step's result, so that memory measured next is one iteration's alone."""

    def restore(self) -> None:
        """Make the inputs what they were before a step that writes over them. Called before each step, never timed."""

    def check(self) -> Verdict:
        """Compare the last step's result with the oracle. Collective: every rank calls it."""


@dataclass(frozen=True)
class Schedule:
    """Iterations that go somewhere, as steps of training do: just so many are run, in order, and every one of them
    counts for the verdict."""

    warmup_iterations: int
    iterations: int
    """Those that are timed, after the warm-up."""
    held_before: int
    """Bytes that the rank held before the session made what its iterations need (`memory.held`): the peak is above
    that, since parameters and states are what implementations differ in."""


@runtime_checkable
class Scheduled(Protocol):
    """A session that says how many iterations there are."""

    schedule: Schedule


@runtime_checkable
class Detailed(Protocol):
    """A session that measures more than its whole iterations."""

    def details(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """More columns of a right row, after those measured so far. Collective; only rank 0's are kept."""
