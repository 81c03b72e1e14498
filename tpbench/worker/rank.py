"""The life of a rank: start the process group, set up the workload, check it, measure it, save the result.

torchrun starts one process per rank: `python -m tpbench.worker.rank TASK_FILE`. A rank says on stderr what it begins,
so that the last line of a rank that hung or died shows where.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tpbench.measure.interleaving import FOLDER, InterleavedRank
from tpbench.worker.context import context_of, device_of_rank, torch_columns
from tpbench.worker.error_location import location
from tpbench.worker.result import ERROR, PEER_LOST, SHARED_MEMORY_FULL
from tpbench.worker.reuse import ReusableProcess
from tpbench.worker.start import die_with_parent, import_once, parent_runs_job
from tpbench.worker.task import Task

if TYPE_CHECKING:
    import torch

_PEER_LOST = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|ncclRemoteError|gloo/transport"
)
"""Messages of gloo and NCCL in a rank whose peer has ended."""

RANK = int(os.environ["RANK"])
started = time.monotonic()
"""Time of this process at which the current task began; a reused process sets it anew for each task."""


def main(task_file: Path) -> NoReturn:
    """Run one task in a process of its own, then exit."""
    die_with_parent()
    task = Task.load(task_file)
    if not parent_runs_job(task.row_id):
        os._exit(ERROR)
    run(task, "", ReusableProcess())
    leave()


def run(task: Task, group_prefix: str, process: ReusableProcess) -> bool:
    """Run a task on this rank. If the task fails, the process exits here.

    `group_prefix` distinguishes this process group from others of the same torchrun. Returns True if this process may
    run another task: the same value on every rank.
    """
    faulthandler.enable()
    try:
        return _measure(task, group_prefix, process)
    except Exception as error:
        traceback.print_exc()
        if _PEER_LOST.search(str(error)):  # the rank that broke the collective knows the reason
            leave(PEER_LOST)
        _save_failure(task, error)
        leave(ERROR)


def leave(code: int = 0) -> NoReturn:
    """Exit at once. An orderly teardown can abort in threads of gloo or NCCL, after the result is saved."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _measure(task: Task, group_prefix: str, process: ReusableProcess) -> bool:
    say("importing torch")
    import_once("torch.distributed", "tpbench.measure.run", task.job.workload.bench_module)
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore

    from tpbench.worker.rendezvous import store_of_agents

    job = task.job
    device = device_of_rank(job.device)
    process.begin_task(job)
    if not dist.is_initialized():
        # Longer than the job's own timeout: the launcher ends a job that takes too long, and knows why it hung.
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            timeout=timedelta(seconds=(job.timeout_s + 60) * task.sharing_cells),
            store=PrefixStore(group_prefix, store_of_agents()),
            rank=RANK,
            world_size=job.world_size,
        )
    process.remember_settings()
    _measure_in_group(task, device, process)
    reason = process.reason_to_exit(device)
    say(f"done; this process ends: {reason}" if reason else "done; this process may run another task")
    stays = torch.tensor(not reason, dtype=torch.int32)
    dist.all_reduce(stays, dist.ReduceOp.MIN)
    return bool(stays)


def _measure_in_group(task: Task, device: torch.device, process: ReusableProcess) -> None:
    """Measure the cell within the process group and save the result.

    When this returns, nothing refers to the cell's tensors.
    """
    from tpbench.measure import rank_memory
    from tpbench.measure.rates import copy_gb_per_s
    from tpbench.measure.run import run as measure

    job = task.job
    bench = job.workload.bench
    if job.outside is not None and (reason := job.outside.refusal(job.problem, job.tp_size)):
        if RANK == 0:
            _save(task, "skipped", reason, **torch_columns(device))
        return
    context = context_of(job, device, task.folder, process.reusable, say)
    limit = rank_memory.limit(device, job.memory_limit_gib, int(os.environ["LOCAL_WORLD_SIZE"]) * task.sharing_cells)
    say("setting up")
    columns = {"memory_limit_gib": limit, "jobs_before": process.tasks_done, **torch_columns(device)}
    copy = copy_gb_per_s(device)
    session = bench.setup(job.problem, job.implementation, context)
    interleaved = InterleavedRank(task.folder / FOLDER) if task.interleaving else None
    verdict, measured = measure(session, context, job.measure, copy, say, job.interpreted, interleaved)
    if RANK == 0:
        _save(task, "wrong" if verdict.wrong else "ok", verdict.wrong, **columns, **measured, **verdict.columns)


def _save(task: Task, status: str, reason: str | None, **columns: Any) -> None:
    """Save the result, unless another rank has saved one."""
    from tpbench.measure import machine

    task.result(status, reason, environment=machine.recorded_environment(), **columns).save(task.folder)


def _save_failure(task: Task, error: Exception) -> None:
    from tpbench.measure import rank_memory

    rank_memory.lift_limit()
    shortage = rank_memory.shortage(error)
    if shortage is None:
        place = location(error)
        _save(task, "error", f"rank {RANK}: {type(error).__name__}{f' in {place}' if place else ''}: {error}")
        return
    if task.sharing_cells > 1:  # interleaved cells share the memory: this says nothing about the cell alone
        say("out of memory beside interleaved cells")
        os._exit(SHARED_MEMORY_FULL)
    asked = f" asking for {shortage / 2**30:.3g} GiB" if shortage else ""
    _save(task, "oom", f"rank {RANK} ran out of memory{asked}", oom_rank=RANK, oom_bytes=shortage or None)


def say(text: str) -> None:
    """Print one line on stderr: what this rank begins."""
    with contextlib.suppress(OSError):  # a full disk must not cost the measurement too
        print(f"[{time.monotonic() - started:.1f} s] rank {RANK}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
