"""The interface between a worker and a workload: `Context` and settings in, a `Session` with its result out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tpbench.measure.clocks import TIMED
from tpbench.settings import setting

STEPS_FILE = "steps.log"
"""A file in the folder of a cell: a sweep prints the lines that a workload appends to it while it runs."""
_CLOCKS = ", ".join(clock.name for clock in TIMED)


@dataclass(frozen=True)
class MeasureSettings:
    """How long and how exactly to measure."""

    measure: str = setting("default", help="name of these settings")
    time_budget_s: float = setting(3.0, help=f"seconds that each clock ({_CLOCKS}) may take", low=0.0)
    min_iterations: int = setting(20, help="a clock measures at least so many iterations", low=1)
    max_iterations: int = setting(1000, help="a clock measures at most so many iterations", low=1)
    precision: float = setting(
        0.01, help="stop if the 95% interval of the median is within this share of it", low=0.0, high=1.0
    )
    graph: bool = setting(False, help="time the replay of a CUDA graph")
    fresh: bool = setting(False, help="change the inputs before every iteration: a stored answer is then wrong")
    late: bool = setting(False, help="also measure what a late rank costs the others")
    profile: bool = setting(False, help="keep each rank's profiler trace of one more iteration")


if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup

ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Context:
    """A rank's place in the (dp, tp) mesh, whose ranks are row-major, and how its job is measured."""

    rank: int
    world_size: int
    tp_rank: int
    tp_size: int
    dp_rank: int
    dp_size: int
    tp_group: ProcessGroup
    """The ranks of this replica. Communicates CPU tensors through gloo and, on GPUs, CUDA tensors through NCCL."""
    dp_group: ProcessGroup
    """The ranks of all replicas with this tp_rank."""
    device: torch.device
    graph: bool = False
    """True if an iteration is the replay of a CUDA graph when it is timed."""
    folder: Path = Path()
    """Folder for files that a rank writes for the job, beside its logs."""
    say: Callable[[str], None] = lambda message: None
    """Write a progress line to stderr."""
    process_stays: bool = False
    """True if this process may run further jobs, which a profiler would slow down."""
    seed: int = 0
    """Seed of the inputs, for the functions of a workload from a user's file."""
    known: dict[str, Any] = field(default_factory=dict)
    """Results of `once`. All set-ups of a cell share them."""

    def once(self, name: str, measure: Callable[[], ResultT]) -> ResultT:
        """Return what `measure` returns, which a set-up on a copy of the inputs does not measure again."""
        if name not in self.known:
            self.known[name] = measure()
        return self.known[name]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Costs:
    """Counted costs of one iteration on the busiest rank. The unavoidable ones make the floor."""

    bytes_moved: int | None
    """Unavoidable bytes through that rank's memory: each input read once, each output written once. None: unknown."""
    bytes_communicated: int
    """Bytes that this variant sends from that rank. Those in a workload's own costs are unavoidable."""
    flops: int = 0
    communicates_in_kernels: bool = False
    """True if all communication happens inside kernels that also compute."""
    compute_ms: float = 0.0
    """Time of the FLOPs at a rate measured on this machine. The floor is at least this."""
    wire_ms: float = 0.0
    """Time of the unavoidable communication at a rate measured on this machine, which the floor adds."""
    wire_beside_memory: bool = False
    """True if one kernel can communicate some bytes while it moves others: the floor has the longer time, not both."""
    consecutive: bool = False
    """True if products and memory traffic need each other's results: the floor is then the sum of their times."""


@dataclass(frozen=True)
class Verdict:
    """The oracle's result for one iteration."""

    columns: dict[str, Any]
    """loss_value, loss_error, grad_error and further columns of the workload."""
    wrong: str | None
    """Why the result is wrong, or None. The same on every rank."""


@dataclass(frozen=True)
class IterationSchedule:
    """A fixed number of iterations that depend on each other, such as training steps. The verdict is about all."""

    warmup_iterations: int
    iterations: int
    """Timed iterations, after the warm-up."""
    held_before: int = 0
    """Bytes that the rank held before the session allocated its own (`rank_memory.held_bytes`): peaks count from it."""


class Session:
    """A workload's variant set up on one rank, ready to run."""

    costs: Costs
    """The costs of an iteration. Read after its check."""
    schedule: IterationSchedule | None = None
    """The iterations that run, if each continues the one before. None: a stop rule decides how many run."""
    trusted: bool = True
    """True for a variant of this package."""

    def step(self) -> None:
        """Run one whole iteration on this rank and keep its result for `check`."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore inputs that a step overwrites. Called before each step, outside the timed region."""

    def release(self) -> None:
        """Free the last step's result, so that the next peak memory is that of one iteration."""

    def outputs(self) -> Sequence[Tensor]:
        """Return the tensors of the last step's result that a step must compute."""
        return ()

    def check(self) -> Verdict:
        """Compare the last step's result with the oracle, or all steps of a schedule. Collective."""
        raise NotImplementedError

    def details(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return more columns of a correct row, given those measured so far. Collective."""
        return {}

    def capture(self) -> float:
        """Make all iterations of a schedule after its warm-up replays of a CUDA graph, and return the GiB that the
        graph keeps. Collective."""
        return 0.0
