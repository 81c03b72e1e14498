"""The GPU that a prediction is for: its memory, and its speed beside that of the GPU of the rows."""

from dataclasses import dataclass

from tpbench.measure.machine import gpu_handles, known_gpu, load_nvml
from tpbench.predict.cells import MeasuredCells
from tpbench.report.analysis.metrics import number
from tpbench.settings import JobError

RESERVE_GIB = 2.0
"""Memory for CUDA's context, NCCL's buffers and fragments that the allocator cannot use."""
NODE_GPUS = 8
"""Most GPUs that reach each other's memory: those of a node."""
SAME_SHARE = 0.05
"""GPUs whose memory differs by a smaller share count as the same."""
DEFAULT_GIB = 80.0
"""Memory of the GPU if neither the user nor the rows say it."""


@dataclass(frozen=True)
class Target:
    """The GPU that a prediction is for."""

    memory_gib: float
    measured_on: str
    """Name of the GPU of the rows."""
    slowdown: float | None = 1.0
    """Bandwidth of the rows' GPU over that of the target (1: the same). None: unknown, so times are withheld."""
    name: str = ""
    """Name of the target if it is another GPU than that of the rows."""
    peers: bool = True
    """False if the GPUs of this machine cannot reach each other's memory."""

    @property
    def free_gib(self) -> float:
        """Memory of the operation, inputs included."""
        return self.memory_gib - RESERVE_GIB

    def speed_text(self) -> str | None:
        """Return what was done with the times because the GPU is another one, or None if it is the same."""
        if self.slowdown == 1:
            return None
        other = f"the rows are of another GPU ({self.measured_on}) than {self.name or 'yours'}"
        if self.slowdown is None:
            return f"{other}, so times are withheld: --bandwidth GB_PER_S, the copy bandwidth of yours, scales them"
        source = ", by the datasheets of both" if known_gpu(self.name) else ""
        return (
            f"{other}: the part of a time that its bandwidth limits is multiplied by {number(self.slowdown)}{source}; "
            "launches and collectives are left as measured, and +- is that of the rows' GPU"
        )


def this_gpu() -> tuple[str, float, bool] | None:
    """Return the name and the memory in GiB of this machine's first GPU, and whether the second one reaches it.

    The result is None without a GPU.
    """
    nvml = load_nvml()
    if nvml is None or not (handles := gpu_handles(nvml)):
        return None
    first, *others = handles
    reads = [nvml.nvmlDeviceGetP2PStatus(first, other, nvml.NVML_P2P_CAPS_INDEX_READ) for other in others[:1]]
    peers = all(status == nvml.NVML_P2P_STATUS_OK for status in reads)
    return str(nvml.nvmlDeviceGetName(first)), int(nvml.nvmlDeviceGetMemoryInfo(first).total) / 2**30, peers


def find_target(
    cells: MeasuredCells, gpu: str | None = None, memory_gib: float | None = None, bandwidth: float | None = None
) -> Target:
    """Return the GPU in question.

    It is the one that `gpu` names, or one with `memory_gib` and `bandwidth` (GB/s, as in the column copy_gb_per_s). If
    none of the three is given, it is this machine's GPU, or without one that of the rows.
    """
    if memory_gib is not None and memory_gib <= RESERVE_GIB:
        raise JobError(f"--gpu-memory {memory_gib:g}: CUDA, NCCL and fragments alone take {RESERVE_GIB:g} GiB")
    name, peers = gpu or "", True
    if (gpu, memory_gib, bandwidth) == (None, None, None) and (here := this_gpu()):
        name, memory_gib, peers = here
    if name.upper() in cells.gpu.upper():
        name, memory_gib = "", memory_gib if gpu or not name else None
    own, facts, of_rows = known_gpu(cells.gpu), known_gpu(name), cells.memory_gib
    memory_gib = memory_gib or (facts[0] if facts else None)
    slowdown: float | None = None
    if bandwidth is not None:
        slowdown = cells.copy_gb_per_s / bandwidth if cells.copy_gb_per_s else None
    elif own and facts:
        slowdown = own[1] / facts[1]
    elif not name and (gpu or not (memory_gib and of_rows) or abs(memory_gib / of_rows - 1) <= SAME_SHARE):
        slowdown = 1.0
    return Target(memory_gib or of_rows or DEFAULT_GIB, cells.gpu, slowdown, name, peers)
