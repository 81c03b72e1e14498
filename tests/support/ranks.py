"""Process groups for tests: `run_on_ranks(2, function, *args)` runs a function on every rank.

Each pytest process starts a group once per world size and reuses it. The function is defined at the top of a module,
because it is pickled by its name, and its first parameter is a `Rank`. Results come back in rank order, with tensors
on the CPU. If a rank raises, dies or does not answer, `RankError` is raised and the group ends. The next call starts a
new group.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

ANSWER_TIMEOUT_S = 280.0
"""Long, because ranks of other tests may use the same cores, and on GPUs each rank compiles its kernels."""
JOIN_TIMEOUT_S = 240.0
"""For the start of a group and for each collective: a rank that waits longer raises, and so names where it waits. Less
than the time for an answer."""
GRACE_S = 5.0
"""Seconds in which the other ranks may answer after one failed. They may wait for it in a collective."""

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
PRELOAD = ["torch", "torch.distributed", "numpy", "pytest"]
PRELOAD += [] if torch.cuda.is_available() else ["tests.support.quick_interpreter"]
"""Modules that are imported once, before ranks are forked. A folder's conftest.py may add the modules of its tests."""

_pools: dict[int, _Pool] = {}


@dataclass(frozen=True)
class Rank:
    """The place where a function runs."""

    rank: int
    world_size: int
    group: dist.ProcessGroup
    device: torch.device


class RankError(AssertionError):
    """A rank raised, died or did not answer."""

    def __init__(self, message: str, answers: dict[int, Any] | None = None) -> None:
        super().__init__(message)
        self.answers = answers or {}
        """Results of the ranks that answered, by rank."""


def run_on_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = ANSWER_TIMEOUT_S
) -> list[Any]:
    """Return the results of `function(Rank, *args)` on each rank.

    The group uses NCCL if there is a GPU for each rank. Otherwise all ranks use the CPU and gloo.
    """
    if world_size not in _pools:
        _pools[world_size] = _Pool(world_size)
    try:
        return _pools[world_size].run(function, args, timeout_s)
    except RankError:
        _pools.pop(world_size).close()
        raise


def enough_gpus(world_size: int) -> bool:
    """Return whether `world_size` ranks can run here. On a machine with GPUs each rank needs one."""
    return not torch.cuda.is_available() or torch.cuda.device_count() >= world_size


def ranks_here(most: int) -> int:
    """Return how many of `most` ranks can run here: all on a machine without GPUs, otherwise one on each GPU."""
    return min(most, torch.cuda.device_count()) if torch.cuda.is_available() else most


class _Pool:
    def __init__(self, world_size: int) -> None:
        self.folder = tempfile.mkdtemp(prefix="tpbench-ranks-")
        # The fork server imports torch once, and then forks each rank quickly.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            here, there = context.Pipe()
            arguments = (rank, world_size, str(Path(self.folder) / "store"), there)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)
        self.collect(ANSWER_TIMEOUT_S)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        # The rank imports the test module by the name that pytest gave it here, so it needs the same path.
        call = (list(sys.path), pickle.dumps((function, args)))
        for rank, pipe in enumerate(self.pipes):
            try:
                pipe.send(call)
            except OSError:
                raise RankError(f"rank {rank} is dead (exit code {self.processes[rank].exitcode})") from None
        return self.collect(timeout_s)

    def collect(self, timeout_s: float) -> list[Any]:
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        while missing := set(range(len(self.pipes))) - answers.keys() - failures.keys():
            ready = wait([self.pipes[rank] for rank in missing], timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                failures.update(dict.fromkeys(missing, "did not answer in time"))
            for rank in missing:
                if self.pipes[rank] in ready:
                    ok, value = self._receive(rank)
                    (answers if ok else failures)[rank] = value
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        if failures:
            said = "\n".join(f"rank {rank}: {failures[rank]}" for rank in sorted(failures))
            raise RankError(said, answers)
        return [answers[rank] for rank in range(len(self.pipes))]

    def _receive(self, rank: int) -> tuple[bool, Any]:
        try:
            ok, payload = self.pipes[rank].recv()
        except (EOFError, OSError):
            self.processes[rank].join(GRACE_S)
            return False, f"died (exit code {self.processes[rank].exitcode})"
        return ok, pickle.loads(payload) if ok else payload

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.join()
            pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)


@atexit.register
def _close_all() -> None:
    while _pools:
        _pools.popitem()[1].close()


def _serve(rank: int, world_size: int, store: str, pipe: Connection) -> None:
    """Join the group, then answer calls until the pipe closes."""
    device = torch.device("cpu")
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    torch.set_num_threads(1)
    if torch.cuda.is_available() and enough_gpus(world_size):
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    limit = timedelta(seconds=JOIN_TIMEOUT_S)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=limit)
    assert dist.group.WORLD is not None
    here = Rank(rank, world_size, dist.group.WORLD, device)
    pipe.send((True, pickle.dumps(None)))
    gc.freeze()  # collections need not visit the preloaded modules
    while True:
        try:
            path, call = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        try:
            sys.path[:] = path
            function, args = pickle.loads(call)
            answer: tuple[bool, Any] = True, pickle.dumps(_to_cpu(function(here, *args)))
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send(answer)


def _to_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, (list, tuple)):
        return type(value)(_to_cpu(each) for each in value)
    if isinstance(value, dict):
        return {key: _to_cpu(each) for key, each in value.items()}
    return value
