"""A process that runs one task after another: what it resets before each, and when it must end.

A process costs seconds: torch's import and, on a GPU, a CUDA context and NCCL's communicators. So the ranks of a
torchrun with a list of tasks keep all of these. A job that changes settings of its process never shares it.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import random
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

MAX_ALLOCATED_BYTES = 16 * 2**20
"""Most memory of a GPU that may be allocated after a task: flags and counters of kernels and libraries."""
MAX_GROWTH_BYTES = 2**28
"""Most memory of a GPU that a process may keep for kernels that are loaded once. It may keep as much again for each
rank of up to eight, for NCCL's channels (about 450 MiB over four ranks)."""
UNMAP_TIMEOUT_S = 2.0
"""Longest wait for memory to become free: memory that peers map is free only when the last peer has unmapped it."""


class WorkerProcess:
    """This rank's process, from its first task on."""

    def __init__(self) -> None:
        self.tasks_done = 0
        self._random_states: tuple[Any, ...] | None = None
        self.agreement: Any = None
        """Process group in which the ranks agree on a lack of memory."""
        self._free_bytes = 0
        """Free memory of the GPU after the first task."""

    def begin_tasks(self) -> None:
        """Reset what the tasks before could have left: compiled functions and, on a CPU, freed memory."""
        gc.collect()
        if "torch._dynamo" in sys.modules:
            importlib.import_module("torch._dynamo").reset()  # it compiles a function for a few shapes only
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)  # memory that C's allocator keeps would not count in the next peak

    def reset_random_numbers(self) -> None:
        """Set every random number generator to its state before the first task."""
        import torch

        if self._random_states is None:
            self._random_states = (random.getstate(), np.random.get_state(), torch.initial_seed())
        python_state, numpy_state, seed = self._random_states
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.manual_seed(seed)

    def reason_to_end(self, device: torch.device, world_size: int) -> str:
        """Return why this process may not run another task, or an empty string if it may.

        Call this after the tasks, when nothing refers to their sessions any longer.
        """
        profiler = sys.modules.get("tpbench.measure.gpu_profiler")
        if profiler is not None and profiler.has_run():
            return "a profiler has run on its GPU, which slows later launches down"
        gc.collect()
        return self._reason_in_memory(device, world_size) if device.type == "cuda" else ""

    def _reason_in_memory(self, device: torch.device, world_size: int) -> str:
        import torch

        torch.cuda.synchronize(device)
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        allocated = torch.cuda.memory_allocated(device)
        if allocated > MAX_ALLOCATED_BYTES:
            return f"tensors of {allocated / 2**20:.1f} MiB are left"
        limit = MAX_GROWTH_BYTES * (1 + min(world_size, 8))
        deadline = time.monotonic() + UNMAP_TIMEOUT_S
        while (growth := self._growth_bytes(device)) > limit:
            if time.monotonic() > deadline:
                return f"its jobs took {growth / 2**20:.0f} MiB of the GPU that they did not give back"
            time.sleep(0.01)
        return ""

    def _growth_bytes(self, device: torch.device) -> int:
        """Return the bytes of the GPU that were free after the first task and are not free now."""
        import torch

        free = int(torch.cuda.mem_get_info(device)[0])
        self._free_bytes = self._free_bytes or free
        return self._free_bytes - free
