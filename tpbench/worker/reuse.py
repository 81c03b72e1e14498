"""When a process that has measured a job may have the next one too: where nothing is left that the next could tell.

On GPUs a process is dear: a CUDA context takes half a second, NCCL's communicators several. So the ranks of a warm
group keep theirs from job to job, as long as each leaves them as it found them.
"""

from __future__ import annotations

import gc
import importlib
import random
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from tpbench.worker.process_state import State, changed, state

if TYPE_CHECKING:
    import torch

    from tpbench.handover.task import CellRow

WORDS_BYTES = 16 * 2**20
"""Of a GPU's memory that may stay taken: flags and counters of kernels and libraries, not tensors of a problem."""
GROWTH_BYTES = 2**28
"""By how much a GPU's free memory may shrink over the jobs of a process, for what comes once and stays: so much for
modules, and as much for each rank of up to eight, to which NCCL has channels (about 450 MiB over four)."""
PATIENCE_S = 2.0
"""Memory that peers map is free only when the last of them has let go of it."""


class Residence:
    """A process from its first job on."""

    def __init__(self) -> None:
        self.jobs = 0
        """That it has measured."""
        self.welcome = False
        """Whether the launcher lets it stay after the job at hand."""
        self.first: CellRow | None = None
        self.state: State | None = None
        self.seeds: tuple[Any, ...] = ()
        self.free_bytes = 0

    def fits(self, row: CellRow) -> bool:
        """Whether it can have this job too: one for the same groups, which live as long as it does."""
        return self.first is not None and _groups(row) == _groups(self.first)

    def enter(self, row: CellRow) -> None:
        """Before a job: every number generator begins where the first job's began."""
        torch = importlib.import_module("torch")
        if self.first is None:
            self.first = row
            self.seeds = (random.getstate(), np.random.get_state(), torch.initial_seed())
        state, numpys, seed = self.seeds
        random.setstate(state)
        np.random.set_state(numpys)
        torch.manual_seed(seed)

    def settled(self) -> None:
        """The process group is up and the job's settings are made: what is so now must be so after each job."""
        if self.state is None:
            self.state = state()

    def ends_because(self, device: torch.device) -> str:
        """After a job, when nothing refers to its session any more: why it may have no other; empty where it may."""
        self.jobs += 1
        if not self.welcome:
            return "each job has a process of its own"
        assert self.state is not None, "settled comes before the job"
        if names := changed(self.state, state()):
            return f"the job changed {', '.join(names)}"
        if _compiled():
            return "torch.compile has compiled something"
        gc.collect()
        return self._memory_taken(device) if device.type == "cuda" else ""

    def _memory_taken(self, device: torch.device) -> str:
        torch = importlib.import_module("torch")
        torch.cuda.synchronize(device)
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        held = torch.cuda.memory_allocated(device)
        if held > WORDS_BYTES:
            return f"tensors of {held / 2**20:.1f} MiB are left"
        assert self.first is not None, "enter comes before the job"
        most = GROWTH_BYTES * (1 + min(self.first.job.world_size, 8))
        patience = time.monotonic() + PATIENCE_S
        while (taken := self._taken(device)) > most:
            if time.monotonic() > patience:
                return f"its jobs took {taken / 2**20:.0f} MiB of the GPU that they did not give back"
            time.sleep(0.01)
        return ""

    def _taken(self, device: torch.device) -> int:
        """Bytes of the GPU that were free after the first job, and are not now."""
        free: int = importlib.import_module("torch").cuda.mem_get_info(device)[0]
        self.free_bytes = self.free_bytes or free
        return self.free_bytes - free


def _groups(row: CellRow) -> tuple[Any, ...]:
    """What process groups are made of."""
    job = row.job
    return job.device, job.world_size, job.tp_size, job.dp_size, job.timeout_s


def _compiled() -> bool:
    """Whether torch.compile has compiled anything here."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"])
