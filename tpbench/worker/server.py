"""A rank that stays for many tasks: `python -m tpbench.worker.server QUEUE_FOLDER`, started by torchrun.

The server imports what every job needs, and never uses a GPU or a process group itself. It forks for each task, and the
child lives the whole life of a rank. So memory, limits, seeds, caches and compiled code end with the child. A child on
a GPU that leaves no observable state runs the next task too (`tpbench.worker.reuse`). After the first task that fails,
the server ends in the same way, and so does its torchrun.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from tpbench.worker.queue import QueuedTask, TaskQueue
from tpbench.worker.result import ERROR, TASK_LEFT
from tpbench.worker.start import die_with_parent, import_once
from tpbench.worker.task import Task


def main(folder: Path) -> NoReturn:
    """Run the tasks of a queue until the launcher ends this process."""
    rank = int(os.environ["RANK"])
    die_with_parent()
    _import_for_all_jobs()
    queue = TaskQueue(folder)
    number = 0
    while True:
        queued = queue.wait(number)
        if queued is None:  # a reused process has released the devices and ended
            queue.finish(number, rank)
        elif child := _fork(queued.task_file):
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            while queue.finished(number, rank):  # a reused child finished several tasks
                number += 1
            if code == TASK_LEFT:
                continue
            _end_like(code)
            queue.finish(number, rank)
        else:
            _run_tasks(queue, number, rank, queued)
        number += 1


def _fork(task_file: Path) -> int:
    _import_for_job(task_file)
    return os.fork()


def _import_for_all_jobs() -> None:
    import_once("torch.distributed", "tpbench.measure.rates", "tpbench.measure.run", "tpbench.worker.rank")


def _import_for_job(task_file: Path) -> None:
    """Import the job's workload once, before the fork. If that fails, the child reports it in the job's result."""
    import torch

    with contextlib.suppress(Exception):
        import_once(Task.load(task_file).job.workload.bench_module)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise RuntimeError("CUDA was used before a job was forked: none could use it")


def _run_tasks(queue: TaskQueue, number: int, rank: int, queued: QueuedTask) -> NoReturn:
    """Run one task in this forked child, then the following ones as long as the process may be reused.

    Each task has its own logs and its own rendezvous.
    """
    from tpbench.worker import rank as worker
    from tpbench.worker.reuse import ReusableProcess

    parent = os.getppid()
    die_with_parent()
    if os.getppid() != parent:
        os._exit(ERROR)
    process, group_prefix = ReusableProcess(), f"job {number}"
    task = Task.load(queued.task_file)
    while True:
        _redirect_output(queued.task_file.parent)
        worker.started = time.monotonic()
        process.reusable = queued.reusable
        if not worker.run(task, group_prefix, process):
            worker.leave()
        queue.finish(number, rank)
        number += 1
        following = queue.wait(number)
        if following is None:
            worker.leave(TASK_LEFT)
        queued, task = following, Task.load(following.task_file)
        if not process.has_groups_of(task.job):
            worker.leave(TASK_LEFT)


def _redirect_output(folder: Path) -> None:
    """Write stdout and stderr of this process to log files in the cell's folder, as torchrun does."""
    logs = folder / "warm" / "attempt_0" / os.environ["LOCAL_RANK"]
    logs.mkdir(parents=True, exist_ok=True)
    for descriptor, name in ((1, "stdout.log"), (2, "stderr.log")):
        file = os.open(logs / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(file, descriptor)
        os.close(file)


def _end_like(code: int) -> None:
    """End this process as its child ended, if that failed: then torchrun's summary is true of the child."""
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
        time.sleep(60)
    if code:
        os._exit(code)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
