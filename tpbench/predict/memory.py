"""Free memory of a GPU, and the verdict on a cell: it fits, it is tight, or it runs out of memory."""

from __future__ import annotations

from dataclasses import dataclass

from tpbench.predict.model import Estimate
from tpbench.workloads.cost_model import ProblemSize

RESERVE_GIB = 2.0
"""Memory for CUDA's context, NCCL's buffers and fragments that the allocator cannot use."""


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


def memory_verdict(size: ProblemSize, peak_gib: Estimate, free: float) -> str:
    """Return `fits`, `OOM`, or `tight` if the error bar includes both."""
    if size.inputs_gib + peak_gib.high <= free:
        return "fits"
    return "OOM" if size.inputs_gib + peak_gib.low > free else "tight"
