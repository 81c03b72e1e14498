"""What a rank runs on, and what it resets between tasks: its process, device, process groups and software.

A process costs seconds: torch's import and, on a GPU, a CUDA context and NCCL's communicators. So the ranks of a
torchrun with a list of tasks keep all of these. A job that changes settings of its process never shares it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import os
import random
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import tpbench
from tpbench.measure.machine import omp_threads

if TYPE_CHECKING:
    import torch

    from tpbench.job import Job
    from tpbench.measure.session import Context
    from tpbench.outside.variant import OutsideVariant


_PACKAGE = Path(tpbench.__file__).resolve().parent
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def device_of_rank(name: str) -> torch.device:
    """Return the device of this rank, and make it the current one. `name`: cuda or cpu, as the job has it.

    Raises RuntimeError if torch cannot use the GPUs.
    """
    import torch

    if name == "cpu":
        torch.set_num_threads(omp_threads() or 1)
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"torch {torch.__version__} cannot use the GPUs of this machine; install a CUDA build or say device=cpu"
        )
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def context_of(
    job: Job, device: torch.device, folder: Path, process_stays: bool, say: Callable[[str], None]
) -> Context:
    """Return what a workload needs to know of this rank, with its process groups. `say` prints a line of progress."""
    import torch.distributed as dist

    from tpbench.measure.session import Context

    dp_rank, tp_rank = divmod(dist.get_rank(), job.tp_size)
    tp_groups, dp_groups = _groups(job.tp_size, job.dp_size)
    return Context(
        rank=dist.get_rank(),
        world_size=job.world_size,
        tp_rank=tp_rank,
        tp_size=job.tp_size,
        dp_rank=dp_rank,
        dp_size=job.dp_size,
        tp_group=tp_groups[dp_rank],
        dp_group=dp_groups[tp_rank],
        device=device,
        graph=job.measure.graph,
        folder=folder,
        say=say,
        process_stays=process_stays,
    )


@functools.cache
def _groups(tp_size: int, dp_size: int) -> tuple[list[Any], list[Any]]:
    """Return the process groups of the rows and of the columns of the (dp, tp) mesh, which is row-major.

    Every rank must create every group in the same order. A group of all ranks is the world itself: another communicator
    would cost seconds and memory.
    """
    import torch.distributed as dist

    def group(ranks: list[int]) -> Any:
        return dist.group.WORLD if len(ranks) == dist.get_world_size() else dist.new_group(ranks)

    replicas = [[dp * tp_size + tp for tp in range(tp_size)] for dp in range(dp_size)]
    return [group(ranks) for ranks in replicas], [group(list(ranks)) for ranks in zip(*replicas, strict=True)]


def torch_columns(device: torch.device) -> dict[str, Any]:
    """Return the columns of a row that only torch knows."""
    import torch
    import torch.distributed as dist

    columns: dict[str, Any] = {"backend": dist.get_backend(), "torch_version": str(torch.__version__)}
    if device.type == "cuda":
        columns["backend"] = "nccl"
        columns["cuda_version"] = torch.version.cuda
        columns["nccl_version"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return columns


def location(error: BaseException, variant: OutsideVariant | None = None) -> str:
    """Return `FILE:LINE (FUNCTION)` of the innermost call outside of libraries, or an empty string if there is none.

    For a variant that returned a wrong type it is the line of the variant. `variant`: the variant that ran, if it is
    from outside this package. Its line follows where a value that it returned may have broken a call of this package.

    The file is relative to the folder of this package, or a name alone: a row must not hold a user's folders.
    """
    from tpbench.workloads.step import WrongReturn

    if isinstance(error, WrongReturn):
        return f"{_short(Path(error.file))}:{error.line}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        own = path.resolve().is_relative_to(_PACKAGE)
        if own or (path.exists() and not str(path.resolve()).startswith(_LIBRARIES)):
            of_variant = f", with the variant of {_short(Path(variant.path))}:{variant.line}" if own and variant else ""
            return f"{_short(path)}:{frame.lineno} ({frame.name}){of_variant}"
    return ""


def _short(path: Path) -> str:
    """Return the path of a file of this package relative to the package's folder, else the file's name."""
    path = path.resolve()
    return str(path.relative_to(_PACKAGE.parent)) if path.is_relative_to(_PACKAGE) else path.name


MAX_ALLOCATED_BYTES = 16 * 2**20
"""Most memory of a GPU that may be allocated after a task: flags and counters of kernels and libraries."""
MAX_GROWTH_BYTES = 2**31
"""Most memory of a GPU that a process may keep for kernels that are loaded once, and for NCCL's channels."""

_free_bytes: dict[torch.device, int] = {}
"""Free memory of the GPU after the first task."""


@functools.cache
def _start() -> tuple[str, dict[str, str]]:
    """Return the working folder and the environment of this process before its first task."""
    try:
        return str(Path.cwd()), dict(os.environ)
    except OSError:  # the folder was deleted
        return "/", dict(os.environ)


def begin_tasks() -> None:
    """Reset what the tasks before could have left: variables of the environment, the working folder, compiled functions
    and, on a CPU, freed memory."""
    folder, variables = _start()
    os.environ.update(variables)
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    with contextlib.suppress(OSError):
        os.chdir(folder)
    gc.collect()
    if "torch._dynamo" in sys.modules:
        importlib.import_module("torch._dynamo").reset()  # it compiles a function for a few shapes only
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # memory that C's allocator keeps would not count in the next peak


def reset_random_numbers() -> None:
    """Set every random number generator to the same state before each task."""
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def reason_to_end(device: torch.device) -> str:
    """Return why this process may not run another task, or an empty string if it may.

    Call this after the tasks, when nothing refers to their sessions any longer. Another process costs some seconds.
    """
    import torch

    profiler = sys.modules.get("tpbench.measure.gpu_trace")
    if profiler is not None and profiler.has_run():
        return "a profiler has run on its GPU, which slows later launches down"
    gc.collect()
    if device.type == "cpu":
        return ""
    torch.cuda.synchronize(device)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    if (allocated := torch.cuda.memory_allocated(device)) > MAX_ALLOCATED_BYTES:
        return f"tensors of {allocated / 2**20:.1f} MiB are left"
    free = int(torch.cuda.mem_get_info(device)[0])
    if (growth := _free_bytes.setdefault(device, free) - free) > MAX_GROWTH_BYTES:
        return f"its jobs took {growth / 2**20:.0f} MiB of the GPU that they did not give back"
    return ""
