"""The process of a rank: its device, and what it resets between tasks.

A process costs seconds: torch's import and, on a GPU, a CUDA context and NCCL's communicators. So the ranks of a
torchrun with a list of tasks keep all of these. A job that changes settings of its process never shares it.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import os
import random
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from tpbench.measure.machine import omp_threads

if TYPE_CHECKING:
    import torch

MAX_ALLOCATED_BYTES = 16 * 2**20
"""Most memory of a GPU that may be allocated after a task: flags and counters of kernels and libraries."""
MAX_GROWTH_BYTES = 2**31
"""Most memory of a GPU that a process may keep for kernels that are loaded once, and for NCCL's channels."""

_free_bytes: dict[torch.device, int] = {}
"""Free memory of the GPU after the first task."""


def device_of_rank(name: str) -> torch.device:
    """Return the device of this rank, and make it the current one. `name`: cuda or cpu, as the job has it."""
    import torch

    if name == "cpu":
        torch.set_num_threads(omp_threads() or 1)
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"torch {torch.__version__} cannot use the GPUs of this machine; install a CUDA build or say device=cpu"
        )
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def torch_columns(device: torch.device) -> dict[str, Any]:
    """Return the columns of a row that only torch knows."""
    import torch
    import torch.distributed as dist

    columns = {"backend": dist.get_backend(), "torch_version": str(torch.__version__)}
    if device.type == "cuda":
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        columns |= {"backend": "nccl", "cuda_version": str(torch.version.cuda), "nccl_version": nccl}
    return columns


@functools.cache
def _start() -> tuple[int, dict[str, str]]:
    """Return the working folder, as an open file, and the environment of this process before its first task."""
    return os.open(".", os.O_RDONLY | os.O_CLOEXEC), dict(os.environ)


def begin_tasks() -> None:
    """Reset what the tasks before could have left in this process."""
    folder, variables = _start()
    os.environ.update(variables)
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.chdir(folder)
    gc.collect()
    if "torch._dynamo" in sys.modules:
        importlib.import_module("torch._dynamo").reset()  # Dynamo compiles a function for a few shapes only
    ctypes.CDLL(None).malloc_trim(0)  # memory that C's allocator keeps would not count in the next peak


def reset_random_numbers() -> None:
    """Set every random number generator to the same state before each task."""
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def reason_to_end(device: torch.device) -> str:
    """Return why this process may not run another task, or an empty string. No session of a task may be left."""
    import torch

    profiler = sys.modules.get("tpbench.measure.gpu_trace")
    if profiler is not None and profiler.has_run:
        return "a profiler has run on its GPU, which slows later launches down"
    gc.collect()
    if device.type == "cpu":
        return ""
    torch.cuda.synchronize(device)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    from tpbench.comm.collectives import windows_of

    windows_gib = sum(windows.gib for windows in windows_of.values())  # the next tasks use them again
    if (allocated := torch.cuda.memory_allocated(device) - int(windows_gib * 2**30)) > MAX_ALLOCATED_BYTES:
        return f"tensors of {allocated / 2**20:.1f} MiB are left"
    free = int(torch.cuda.mem_get_info(device)[0])
    if (growth := _free_bytes.setdefault(device, free) - free) > MAX_GROWTH_BYTES:
        return f"its jobs took {growth / 2**20:.0f} MiB of the GPU that they did not give back"
    return ""
