"""The GPU that a prediction is for: its memory, and its speed beside that of the GPU of the rows."""

from dataclasses import dataclass

from tpbench.measure.machine import gpu_handles, known_gpu, load_nvml
from tpbench.predict.cells import MeasuredCells, slowdown_of
from tpbench.settings import JobError
from tpbench.suggestions import number

RESERVE_GIB = 2.0
"""Memory for CUDA's context, NCCL's buffers and fragments that the allocator cannot use."""
NODE_GPUS = 8  # no row says what a network between nodes costs


@dataclass(frozen=True)
class Target:
    """The GPU that a prediction is for."""

    memory_gib: float
    measured_on: str  # name of the GPU of the rows
    slowdown: float | None = 1.0
    """Bandwidth of the rows' GPU over that of the target (1: the same). None: unknown, so times are withheld."""
    name: str = ""
    peers: bool = True  # false if the GPUs of this machine cannot reach each other's memory

    @property
    def free_gib(self) -> float:
        """Memory of the operation, inputs included."""
        return self.memory_gib - RESERVE_GIB

    def speed_text(self) -> str:
        """Return what was done with the times because the GPU is another one, or nothing if it is the same."""
        if self.slowdown == 1:
            return ""
        other = f"the rows are of another GPU ({self.measured_on}) than {self.name}"
        if self.slowdown is None:
            return f"{other}, whose bandwidth is unknown, so times are withheld: measure a few small cells on it"
        return (
            f"{other}: the part of a time that its bandwidth limits is multiplied by {number(self.slowdown)}, by the "
            "datasheets of both; launches and collectives are left as measured, and +- is that of the rows' GPU"
        )


def this_gpu() -> tuple[str, float, bool] | None:
    """Return name and GiB of this machine's first GPU, and whether it reads the second's memory. None: no GPU."""
    if (nvml := load_nvml()) is None or not (handles := gpu_handles(nvml)):
        return None
    first, *others = handles
    reads = [nvml.nvmlDeviceGetP2PStatus(first, other, nvml.NVML_P2P_CAPS_INDEX_READ) for other in others[:1]]
    peers = all(status == nvml.NVML_P2P_STATUS_OK for status in reads)
    return str(nvml.nvmlDeviceGetName(first)), int(nvml.nvmlDeviceGetMemoryInfo(first).total) / 2**30, peers


def find_target(cells: MeasuredCells, gpu: str | None = None, memory_gib: float | None = None) -> Target:
    """Return the GPU that `gpu` names, or this machine's, or that of the rows. `memory_gib` replaces its memory."""
    if memory_gib is not None and not RESERVE_GIB < memory_gib < float("inf"):
        raise JobError(f"--gpu-memory {memory_gib:g}: CUDA, NCCL and fragments alone take {RESERVE_GIB:g} GiB")
    name, own_gib, peers = (gpu, None, True) if gpu else this_gpu() or (cells.gpu, None, True)
    if name.upper() in cells.gpu.upper():
        return Target(memory_gib or own_gib or cells.memory_gib, cells.gpu, 1.0, name, peers)
    facts = known_gpu(name)
    memory_gib = memory_gib or own_gib or (facts[0] if facts else cells.memory_gib)
    return Target(memory_gib, cells.gpu, slowdown_of(cells.gpu, name), name, peers)
