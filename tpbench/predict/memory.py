"""Free memory of a GPU, and the predicted outcome of a cell: it fits, it is tight, or it runs out of memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tpbench.predict.estimate import Estimate
from tpbench.report.analysis.metrics import number
from tpbench.workloads.cost_model import ProblemSize

RESERVE_GIB = 2.0
"""Memory for CUDA's context, NCCL's buffers and fragments that the allocator cannot use."""
SAME_SHARE = 0.05
"""GPUs whose memory differs by a smaller share count as the same."""
_OUTCOMES = ("fits", "tight", "OOM")


@dataclass(frozen=True)
class TrainedModel:
    """A transformer in training that shares the GPU's memory with the measured operation."""

    name: str
    parameters: float
    layers: int
    hidden: int
    gpus: int
    """GPUs that it is trained on. Its states are sharded over all of them."""

    def taken_gib(self, tokens: int, tp_size: int) -> float:
        """Return the memory of a GPU that is taken before the operation. `ASSUMPTION` explains the formula."""
        states = 16 * self.parameters / self.gpus
        gathered = 2 * 2 * self.parameters / self.layers / tp_size
        checkpoints = 2 * tokens * self.hidden * self.layers / tp_size
        working = 34 * tokens * self.hidden / tp_size
        return (states + gathered + checkpoints + working) / 2**30


ASSUMPTION = (
    "bf16 training with Adam, fully sharded: 16 bytes a parameter (weights 2, gradients 2, fp32 weights and moments "
    "12) over all GPUs (8B on 8, 70B on 64, 405B on 512); two layers' weights gathered, sharded by tp; one "
    "checkpointed input a layer (2 bytes x tokens x hidden) and one layer's activations (34 bytes x tokens x "
    f"hidden), both sharded by tp; {RESERVE_GIB:g} GiB for CUDA, NCCL and fragments"
)
MODELS = {
    model.name: model
    for model in (
        TrainedModel("8B", 8.03e9, 32, 4096, 8),
        TrainedModel("70B", 70.6e9, 80, 8192, 64),
        TrainedModel("405B", 405.9e9, 126, 16384, 512),
    )
}


def free_gib(gpu_memory_gib: float, size: ProblemSize, model: TrainedModel | None = None) -> float:
    """Return the memory of a GPU for the operation, inputs included."""
    return gpu_memory_gib - RESERVE_GIB - (model.taken_gib(size.tokens, size.tp_size) if model else 0.0)


class RanOut(NamedTuple):
    """A measured cell that ran out of memory."""

    needed_gib: float
    """Predicted need, inputs included."""
    gpu_memory_gib: float
    """Memory of the GPU that the cell ran on, or the limit that its job set."""


@dataclass(frozen=True)
class MeasuredMemory:
    """Results of one variant's measured cells, which bound the memory that fits."""

    largest_ok_gib: float = 0.0
    """Largest predicted need of a cell that ran, inputs included."""
    ran_out: tuple[RanOut, ...] = ()

    def smallest_ran_out(self, free: float) -> RanOut | None:
        """Return the cell with the smallest need that ran out although its GPU had at least `free` GiB."""
        alike = [each for each in self.ran_out if free <= (each.gpu_memory_gib - RESERVE_GIB) * (1 + SAME_SHARE)]
        return min(alike, default=None)

    def outcome(self, needed_gib: float, free: float) -> str:
        """Return `OOM` from the need of a cell that ran out, `tight` if it is above those that ran, else `fits`.

        If a cell ran out and one with a larger need ran, a need between the two is `tight`, too.
        """
        failed = self.smallest_ran_out(free)
        if failed is None:
            return _OUTCOMES[0]
        return _OUTCOMES[(needed_gib >= failed.needed_gib) + (needed_gib > self.largest_ok_gib)]


def memory_outcome(
    size: ProblemSize, peak_gib: Estimate, free: float, memory_bounds: MeasuredMemory | None = None
) -> str:
    """Return `fits`, `OOM`, or `tight` if the error bar includes both. Measured cells can make it worse."""
    predicted = "tight"
    if size.inputs_gib + peak_gib.high <= free:
        predicted = "fits"
    elif size.inputs_gib + peak_gib.low > free:
        predicted = "OOM"
    measured = memory_bounds.outcome(size.inputs_gib + peak_gib.value, free) if memory_bounds else "fits"
    return max(predicted, measured, key=_OUTCOMES.index)


def memory_reason(size: ProblemSize, peak_gib: Estimate, free: float, memory_bounds: MeasuredMemory) -> str | None:
    """Return the measured cells that make the outcome worse than the prediction alone, or None if none do."""
    outcome = memory_outcome(size, peak_gib, free, memory_bounds)
    failed = memory_bounds.smallest_ran_out(free)
    if failed is None or outcome == memory_outcome(size, peak_gib, free):
        return None
    largest = f", the largest that ran needs {number(memory_bounds.largest_ok_gib)} GiB" if outcome == "tight" else ""
    return (
        f"with its inputs it needs {number(size.inputs_gib + peak_gib.value)} GiB, and a measured cell that needs "
        f"{number(failed.needed_gib)} GiB ran out of memory within {number(failed.gpu_memory_gib)} GiB{largest}"
    )
