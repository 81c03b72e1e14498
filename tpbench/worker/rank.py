"""The life of a rank: start the process group, set up each task's workload, check it, measure it, save the result.

torchrun starts one process per rank: `python -m tpbench.worker.rank FILE`. The file is a task, or a list of tasks that
grows. A rank says on stderr what it begins, so that the last line of a rank that hung or died shows where.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tpbench import packages
from tpbench.suggestions import memory_text, message
from tpbench.worker.process import begin_tasks, device_of_rank, reason_to_end, reset_random_numbers, torch_columns
from tpbench.worker.start import AGENT, ERROR, PEER_LOST, STACK_SIGNAL, die_with_parent, import_once
from tpbench.worker.task import PROGRESS_FILE, TASK_FILE, JsonLines, Task

if TYPE_CHECKING:
    import torch

    from tpbench.job import Job
    from tpbench.measure.run import Cell
    from tpbench.measure.session import Context
    from tpbench.measure.stop_rules import RoundRequest
    from tpbench.outside.variant import OutsideVariant

_PEER_LOST = re.compile(r"Connection (closed|reset) by peer|Broken pipe|ncclRemoteError|gloo/transport")
"""Messages of gloo and NCCL in a rank whose peer has ended."""

RANK, LOCAL_RANK = int(os.environ.get("RANK", 0)), os.environ.get("LOCAL_RANK", "0")
started = time.monotonic()
"""Time of this process at which the present tasks began."""


def main(file: Path) -> NoReturn:
    """Run the task in the file, or the tasks of a list until it ends, and exit."""
    global started
    die_with_parent(parent=int(os.environ[AGENT]))
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, all_threads=False)
    progress = None if file.name == TASK_FILE else JsonLines(file.with_name(PROGRESS_FILE))
    done = 0
    for files in _lists_of_tasks(file):
        started = time.monotonic()
        if not run(Tasks(files, done, progress)):
            break
        done += len(files)
    leave()


def _lists_of_tasks(file: Path) -> Iterator[list[Path]]:
    """Yield the files of tasks that run together: the only one, or those of each line of a list that grows."""
    if file.name == TASK_FILE:
        yield [file]
        return
    lines = JsonLines(file)
    while True:
        time.sleep(0.005)
        for names in lines.read():
            yield list(map(Path, names))


def leave(code: int = 0) -> NoReturn:
    """Exit at once. An orderly teardown can abort in threads of gloo or NCCL, after the result is saved."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def run(tasks: Tasks) -> bool:
    """Run tasks, and exit if one fails. Return if this process may run others: the same value on every rank."""
    try:
        return tasks.run()
    except BaseException as error:
        traceback.print_exc()
        if _PEER_LOST.search(message(error)):  # the rank that broke the collective knows the reason
            leave(PEER_LOST)
        _save_failure(tasks.now, error)
        leave(ERROR)


class Tasks:
    """Tasks that run together in this process: one, or the interleaved ones of a problem."""

    def __init__(self, files: Sequence[Path], jobs_before: int, progress: JsonLines | None) -> None:
        """`jobs_before`: tasks that ran before. `progress`: lines for the launcher; None: no other tasks follow."""
        self.files, self.jobs_before, self.progress = files, jobs_before, progress
        self.tasks = [Task.load(file) for file in files]
        self.now = self.tasks[0]
        self.cells: dict[int, Cell] = {}
        """The cells that are not finished, by the place of their task."""
        self.requests: dict[int, RoundRequest] = {}
        """The request of each of these cells after its last round."""
        self.columns: dict[int, dict[str, Any]] = {}

    def run(self) -> bool:
        """Run all tasks and save their results. Return whether this process may run others."""
        self._turn_to(0)
        say("importing torch")
        job = self.now.job
        import_once("torch.distributed", "tpbench.measure.run", job.workload.bench_module)
        import torch
        import torch.distributed as dist

        from tpbench.measure.stop_rules import next_cells

        device = device_of_rank(job.device)
        begin_tasks()
        if not dist.is_initialized():
            from tpbench.worker.rendezvous import store_of_agents

            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                # Longer than the job's timeout: the launcher ends a job that takes too long, and knows why it hung.
                timeout=timedelta(seconds=job.timeout_s + 60),
                store=store_of_agents(),
                rank=RANK,
                world_size=job.world_size,
            )
        for place in range(len(self.tasks)):
            self._set_up(place, device)
        for place in next_cells(self.requests):
            self._turn_to(place)
            self.cells[place].run_round()
            self.requests[place] = self.cells[place].request()
        for place in list(self.cells):
            self._turn_to(place)
            self._finish(place)
        reason = reason_to_end(device) if self.progress else ""
        say(f"done; this process ends: {reason}" if reason else "done")
        stays = torch.tensor(not reason, dtype=torch.int32)
        dist.all_reduce(stays, dist.ReduceOp.MIN)
        if self.progress and RANK == 0:
            self.progress.append(reason or ("" if stays else "another rank's process ends"))
        return bool(stays)

    def _turn_to(self, place: int) -> None:
        """Let a task run now: the folder of its file gets the output."""
        self.now = self.tasks[place]
        if self.progress is None:
            return  # torchrun has redirected the output
        _redirect_output(self.files[place].parent)
        if RANK == 0:
            self.progress.append(place)

    def _set_up(self, place: int, device: torch.device) -> None:
        """Set a task up, check it, and measure it if no other one runs with it."""
        from tpbench.measure import rank_memory
        from tpbench.measure.rates import copy_gb_per_s
        from tpbench.measure.run import Cell

        self._turn_to(place)
        task, job = self.now, self.now.job
        columns = self.columns[place] = torch_columns(device)
        if job.outside is not None and (refusal := job.outside.refusal(job.problem, job.tp_size, job.dp_size)):
            if RANK == 0:
                _save(task, "skipped", refusal, **columns)
            return
        reset_random_numbers()
        context = context_of(job, device, task.folder, process_stays=self.progress is not None)
        copy_rate = copy_gb_per_s(device)  # before the limit, because the job doesn't need these buffers
        limit = rank_memory.limit(device, job.memory_limit_gib, int(os.environ["LOCAL_WORLD_SIZE"]))
        columns |= {"memory_limit_gib": limit, "jobs_before": self.jobs_before}
        say("setting up")
        columns["start_s"] = max(0.0, (datetime.now(UTC) - task.started_at).total_seconds())
        set_up, interleaved = functools.partial(job.set_up, context), len(self.tasks) > 1
        cell = Cell(set_up, context, job.measure, copy_rate, job.interpreted, interleaved=interleaved)
        self.cells[place] = cell
        cell.begin()
        if cell.in_rounds:
            self.requests[place] = cell.request()
        else:
            self._finish(place)

    def _finish(self, place: int) -> None:
        """Finish a cell's measurement, and save its result."""
        verdict = self.cells.pop(place).finish()
        if RANK == 0:
            columns = {**self.columns[place], **verdict.columns}
            _save(self.now, "wrong" if verdict.wrong else "ok", verdict.wrong, **columns)


def context_of(job: Job, device: torch.device, folder: Path, process_stays: bool) -> Context:
    """Return what a workload needs to know of this rank, with its process groups."""
    import torch.distributed as dist

    from tpbench.measure.session import Context

    dp_rank, tp_rank = divmod(dist.get_rank(), job.tp_size)
    nccl: str = "default" if job.outside else getattr(job.problem, "nccl", "default")
    tp_groups, dp_groups = _groups(job.tp_size, job.dp_size, nccl, device)
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
def _groups(tp_size: int, dp_size: int, nccl: str, device: torch.device) -> tuple[list[Any], list[Any]]:
    """Return the process groups of the rows and columns of the (dp, tp) mesh, made in the same order on every rank."""
    import torch.distributed as dist

    from tpbench.comm.collectives import group_with_windows

    def group(ranks: list[int]) -> Any:
        if nccl != "default":
            return group_with_windows(ranks, nccl, device)
        # Another communicator of all ranks would cost seconds and memory.
        return dist.group.WORLD if len(ranks) == dist.get_world_size() else dist.new_group(ranks)

    replicas = [[dp * tp_size + tp for tp in range(tp_size)] for dp in range(dp_size)]
    return [group(ranks) for ranks in replicas], [group(list(ranks)) for ranks in zip(*replicas, strict=True)]


def _redirect_output(folder: Path) -> None:
    """Write stdout and stderr of this process to log files in a cell's folder, as torchrun does."""
    logs = folder / "warm" / "attempt_0" / LOCAL_RANK
    logs.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    for descriptor, name in ((1, "stdout.log"), (2, "stderr.log")):
        file = os.open(logs / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(file, descriptor)
        os.close(file)


def _save(task: Task, status: str, reason: str | None, **columns: Any) -> None:
    from tpbench.measure import machine

    task.result(status, reason, environment=machine.recorded_environment(), **columns).save(task.folder)


def _save_failure(task: Task, error: BaseException) -> None:
    from tpbench.measure import rank_memory

    rank_memory.lift_limit()
    shortage, text = rank_memory.shortage(error), message(error)
    if shortage is not None:
        asked = f" asking for {memory_text(shortage / 2**30)}" if shortage else ""
        _save(task, "oom", f"rank {RANK} ran out of memory{asked}", oom_rank=RANK, oom_bytes=shortage or None)
        return
    name = " in ".join(filter(None, [type(error).__name__, location(error, task.job.outside)]))
    _save(task, "error", ": ".join(filter(None, [f"rank {RANK}", name, text])))


def location(error: BaseException, variant: OutsideVariant | None = None) -> str:
    """Return `FILE:LINE (FUNCTION)` of the innermost call outside of libraries, without folders, or an empty string."""
    from tpbench.workloads.step import WrongReturn

    if isinstance(error, WrongReturn):
        return f"{packages.short_name(Path(error.file))}:{error.line}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        own = packages.is_own(path)
        if own or (path.exists() and not packages.is_library(path)):
            place = f"{packages.short_name(path)}:{frame.lineno} ({frame.name})"
            if own and variant:  # a value of the variant may have broken the call
                place += f", with the variant of {packages.short_name(Path(variant.path))}:{variant.line}"
            return place
    return ""


def say(text: str) -> None:
    """Print one line on stderr: what this rank begins."""
    with contextlib.suppress(OSError):  # a full disk must not cost the measurement too
        print(f"[{time.monotonic() - started:.1f} s] rank {RANK}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
