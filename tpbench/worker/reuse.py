"""Reuse of a worker process: only if the last task left no observable state.

On GPUs a process is expensive: a CUDA context takes half a second, NCCL's communicators several. So the ranks of a
reused torchrun keep both from task to task. On CPUs each task runs in a forked process.
"""

from __future__ import annotations

import functools
import gc
import importlib
import operator
import os
import random
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import torch

    from tpbench.job import Job

MAX_ALLOCATED_BYTES = 16 * 2**20
"""Most memory of a GPU that may be allocated after a task: flags and counters of kernels and libraries."""
MAX_GROWTH_BYTES = 2**28
"""Most memory of a GPU that a process may keep for kernels that are loaded once. It may keep as much again for each
rank of up to eight, for NCCL's channels (about 450 MiB over four ranks)."""
UNMAP_TIMEOUT_S = 2.0
"""Longest wait for memory to become free: memory that peers map is free only when the last peer has unmapped it."""

Settings: TypeAlias = Mapping[str, Any]
"""Process-wide settings by name. Environment variables are called $NAME."""

SET_BY_TORCH = frozenset({"$TORCHINDUCTOR_CACHE_DIR"})
"""Variables that torch sets to their default when some of its modules are loaded. They change no job."""

TORCH_SETTINGS = (
    "get_default_dtype",
    "get_default_device",
    "get_float32_matmul_precision",
    "get_num_threads",
    "get_num_interop_threads",
    "is_grad_enabled",
    "is_inference_mode_enabled",
    "is_anomaly_enabled",
    "is_autocast_cache_enabled",
    "are_deterministic_algorithms_enabled",
    "is_deterministic_algorithms_warn_only_enabled",
    "utils.deterministic.fill_uninitialized_memory",
    "backends.fp32_precision",
    "backends.mkldnn.enabled",
    "backends.cudnn.enabled",
    "backends.cudnn.benchmark",
    "backends.cudnn.benchmark_limit",
    "backends.cudnn.deterministic",
    "backends.cudnn.allow_tf32",
    "backends.cudnn.fp32_precision",
    "backends.cuda.matmul.allow_tf32",
    "backends.cuda.matmul.fp32_precision",
    "backends.cuda.matmul.allow_fp16_accumulation",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cuda.flash_sdp_enabled",
    "backends.cuda.mem_efficient_sdp_enabled",
    "backends.cuda.math_sdp_enabled",
    "backends.cuda.cudnn_sdp_enabled",
    "backends.cuda.fp16_bf16_reduction_math_sdp_allowed",
)
"""Attributes of torch: values, and functions without arguments that return one."""

PROCESS_SETTINGS: dict[str, Callable[[], Any]] = {
    "the working directory": os.getcwd,
    "umask": lambda: re.findall(r"^Umask:\s*(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE),
    "sys.path": lambda: tuple(sys.path),
    "gc.isenabled": gc.isenabled,
    "denormal numbers": lambda: sys.float_info.min / 2 > 0,  # torch has no function that tells whether they are flushed
    "autocast on CPUs": lambda: _autocast("cpu"),
    "autocast on GPUs": lambda: _autocast("cuda"),
}

TORCH_CONFIG_MODULES = ("torch._dynamo.config", "torch._functorch.config", "torch._inductor.config")
"""Modules of settings that torch loads on first use. Until then their settings are the defaults."""


def settings() -> Settings:
    """Return all process-wide settings as they are now."""
    torch = importlib.import_module("torch")
    return {
        **{f"torch.{name}": _read(functools.partial(_attribute, torch, name)) for name in TORCH_SETTINGS},
        **{name: _read(reader) for name, reader in PROCESS_SETTINGS.items()},
        **{name: sys.modules[name].codegen_config() if name in sys.modules else "" for name in TORCH_CONFIG_MODULES},
        **{f"${name}": value for name, value in os.environ.items()},
    }


def changed(before: Settings, after: Settings) -> list[str]:
    """Return the names of the settings that differ."""
    names = (before.keys() | after.keys()) - SET_BY_TORCH
    return sorted(name for name in names if before.get(name) != after.get(name))


def _attribute(torch: Any, name: str) -> Any:
    value = operator.attrgetter(name)(torch)
    return value() if callable(value) else value


def _autocast(device: str) -> tuple[Any, ...]:
    torch = importlib.import_module("torch")
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _read(reader: Callable[[], Any]) -> Any:
    """Return a setting. If this version of torch cannot tell it, return the error message as the value."""
    try:
        return reader()
    except Exception as error:
        return repr(error)


class ReusableProcess:
    """A worker process from its first task on."""

    def __init__(self) -> None:
        self.tasks_done = 0
        self.reusable = False
        """True if the launcher allows this process to run another task after the current one."""
        self.first_job: Job | None = None
        self.settings: Settings | None = None
        self.random_states: tuple[Any, ...] = ()
        self.free_bytes = 0
        """Free memory of the GPU after the first task."""

    def has_groups_of(self, job: Job) -> bool:
        """Return True if this process has the process groups that the job needs: they live as long as the process."""
        return self.first_job is not None and _groups_key(job) == _groups_key(self.first_job)

    def begin_task(self, job: Job) -> None:
        """Set every random number generator to its state before the first task."""
        torch = importlib.import_module("torch")
        if self.first_job is None:
            self.first_job = job
            self.random_states = (random.getstate(), np.random.get_state(), torch.initial_seed())
        python_state, numpy_state, seed = self.random_states
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.manual_seed(seed)

    def remember_settings(self) -> None:
        """Remember the settings of the first task, once its process group is up. Every task must leave these."""
        if self.settings is None:
            self.settings = settings()

    def reason_to_exit(self, device: torch.device) -> str:
        """Return why this process may not run another task, or an empty string if it may.

        Call this after each task, when nothing refers to the task's session any longer.
        """
        self.tasks_done += 1
        if not self.reusable:
            return "each job has a process of its own"
        assert self.settings is not None, "remember_settings comes before the task"
        if names := changed(self.settings, settings()):
            return f"the job changed {', '.join(names)}"
        if _has_compiled():
            return "torch.compile has compiled something"
        if _has_profiled():
            return "a profiler has run on its GPU, which slows later launches down"
        gc.collect()
        return self._reason_in_memory(device) if device.type == "cuda" else ""

    def _reason_in_memory(self, device: torch.device) -> str:
        torch = importlib.import_module("torch")
        torch.cuda.synchronize(device)
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        allocated = torch.cuda.memory_allocated(device)
        if allocated > MAX_ALLOCATED_BYTES:
            return f"tensors of {allocated / 2**20:.1f} MiB are left"
        assert self.first_job is not None, "begin_task comes before the task"
        limit = MAX_GROWTH_BYTES * (1 + min(self.first_job.world_size, 8))
        deadline = time.monotonic() + UNMAP_TIMEOUT_S
        while (growth := self._growth_bytes(device)) > limit:
            if time.monotonic() > deadline:
                return f"its jobs took {growth / 2**20:.0f} MiB of the GPU that they did not give back"
            time.sleep(0.01)
        return ""

    def _growth_bytes(self, device: torch.device) -> int:
        """Return the bytes of the GPU that were free after the first task and are not free now."""
        free: int = importlib.import_module("torch").cuda.mem_get_info(device)[0]
        self.free_bytes = self.free_bytes or free
        return self.free_bytes - free


def _groups_key(job: Job) -> tuple[Any, ...]:
    """Return what the process groups of a job depend on."""
    return job.device, job.world_size, job.tp_size, job.dp_size, job.timeout_s


def _has_compiled() -> bool:
    """Return True if torch.compile has compiled anything in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"])


def _has_profiled() -> bool:
    """Return True if this process has profiled a GPU."""
    profiler = sys.modules.get("tpbench.measure.gpu_profiler")
    return profiler is not None and bool(profiler.has_run())
