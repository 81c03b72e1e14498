"""The GPU that a prediction is for: its free memory, and whether a cell fits, is tight or runs out of memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tpbench.measure.machine import nvml_session, nvml_text
from tpbench.predict.cells import MeasuredCells
from tpbench.report.analysis.metrics import number
from tpbench.workloads.cost_model import ProblemSize

LARGEST_ERROR = 0.5
"""A number with a larger relative error is called unknown."""


@dataclass(frozen=True)
class Estimate:
    """A number with its error bar."""

    value: float
    error: float
    """As a share of the value."""

    @classmethod
    def of(cls, value: float | None, error: float) -> Estimate:
        """Return the estimate. A value of None is unknown: its error is infinite."""
        return cls(0.0, math.inf) if value is None else cls(value, error)

    @property
    def low(self) -> float:
        return self.value / (1 + self.error)

    @property
    def high(self) -> float:
        return self.value * (1 + self.error)

    @property
    def known(self) -> bool:
        """False if the error bar is so wide that the value says nothing."""
        return self.error <= LARGEST_ERROR


RESERVE_GIB = 2.0
"""Memory for CUDA's context, NCCL's buffers and fragments that the allocator cannot use."""
SAME_SHARE = 0.05
"""GPUs whose memory differs by a smaller share count as the same."""


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


DEFAULT_GIB = 80.0
"""Memory of the GPU if neither the user nor the rows say it."""


@dataclass(frozen=True)
class Target:
    """The GPU that a prediction is for."""

    memory_gib: float
    measured_on: str
    """Name of the GPU of the rows."""
    is_measured: bool
    """True if the target is the GPU of the rows, as far as its memory and bandwidth tell."""
    slowdown: float | None = 1.0
    """Bandwidth of the rows' GPU over that of the target. None: unknown, so times are withheld."""
    beside: TrainedModel | None = None
    name: str = ""
    """Name of the target if it is this machine's GPU and not that of the rows."""

    def free_gib(self, size: ProblemSize) -> float:
        """Return the memory of the operation, inputs included."""
        return free_gib(self.memory_gib, size, self.beside)

    def memory_text(self, size: ProblemSize) -> str:
        """Return the terms of the free memory."""
        terms = [f"{number(self.memory_gib)} GiB of a GPU", f"{RESERVE_GIB:g} GiB reserve for CUDA, NCCL and fragments"]
        if self.beside:
            taken = self.beside.taken_gib(size.tokens, size.tp_size)
            terms.append(
                f"{number(taken)} GiB for a model of {self.beside.name} in training on {self.beside.gpus} GPUs"
            )
        return (
            f"memory: {' - '.join(terms)} = {number(self.free_gib(size))} GiB; "
            f"inputs take {number(size.inputs_gib)} GiB of it"
        )

    def speed_text(self) -> str | None:
        """Return what was done with the times because the GPU is another one, or None if it is the same."""
        if self.is_measured:
            return None
        other = (
            f"the rows are of another GPU ({self.measured_on}{f', this machine has {self.name}' if self.name else ''})"
        )
        if self.slowdown is None:
            return (
                f"{other}, so times are withheld: --bandwidth GB_PER_S, the copy bandwidth of yours, scales them; "
                f"--gpu {self.measured_on!r} shows them as measured"
            )
        return (
            f"{other}: the part of a time that its bandwidth limits is multiplied by {number(self.slowdown)}; launches "
            "and collectives are left as measured, and +- is that of the rows' GPU"
        )


def this_gpu() -> tuple[str, float] | None:
    """Return the name and the memory in GiB of this machine's first GPU, or None if it has none."""
    with nvml_session() as nvml:
        if nvml is None or not nvml.nvmlDeviceGetCount():
            return None
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
        return nvml_text(nvml.nvmlDeviceGetName(handle)), int(nvml.nvmlDeviceGetMemoryInfo(handle).total) / 2**30


def find_target(
    cells: MeasuredCells,
    gpu: str | None = None,
    memory_gib: float | None = None,
    bandwidth: float | None = None,
    beside: TrainedModel | None = None,
) -> Target:
    """Return the GPU in question.

    It is that of the rows if `gpu` names it, else one with `memory_gib` and `bandwidth` (GB/s, as in the column
    copy_gb_per_s). If none of the three is given, it is this machine's GPU, or without one that of the rows.
    """
    name = ""
    here = this_gpu() if gpu is None and memory_gib is None and bandwidth is None else None
    if here is not None and here[0] != cells.gpu:
        name, memory_gib = here
    known = cells.memory_gib
    same_memory = not (memory_gib and known) or abs(memory_gib / known - 1) <= SAME_SHARE
    same = gpu is not None or (same_memory and not name)
    slowdown: float | None = 1.0 if same else None
    if bandwidth is not None:
        slowdown = cells.copy_gb_per_s / bandwidth if cells.copy_gb_per_s else None
        same = same and slowdown is not None and abs(slowdown - 1) <= SAME_SHARE
    return Target(memory_gib or known or DEFAULT_GIB, cells.gpu, same, slowdown, beside, name)
