"""Of this machine what only a plan asks for."""

from __future__ import annotations


def gpu_memory_gib() -> float | None:
    """Memory of the smallest GPU, or None where there is none."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return min((int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) / 2**30 for handle in handles), default=None)
    finally:
        pynvml.nvmlShutdown()
