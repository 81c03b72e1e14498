"""Runs the cells of a sweep as Slurm jobs: submits them, waits, and returns their outcomes."""

from __future__ import annotations

import math
import shlex
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from tpbench.job import Job
from tpbench.launcher import interrupts, torchrun
from tpbench.launcher.attempt import Attempt, abandon
from tpbench.launcher.display import Display
from tpbench.launcher.options import SweepOptions
from tpbench.launcher.planning.plan import Cell
from tpbench.launcher.slurm import cluster
from tpbench.launcher.slurm.cluster import ENDED, SlurmSettings
from tpbench.launcher.slurm.layout import Layout, Partition, layout
from tpbench.launcher.slurm.submitted import (
    SUBMITIT,
    closed,
    forget_job,
    is_wanted,
    job_of,
    left_behind,
    record,
    runs_others,
)
from tpbench.measure import machine
from tpbench.settings import JobError, spelled
from tpbench.worker.start import create_secret

Item = TypeVar("Item")

START_MIN = 10
"""Minutes beyond the time of a job's cells, in which its processes start and end."""

ROW_DELAY_S = 10.0
"""Time after a job's end in which its row may become visible: network file systems show new files late."""


class Slurm:
    """Runs cells as jobs of a Slurm cluster."""

    def __init__(self, settings: SlurmSettings, options: SweepOptions) -> None:
        if options.retries and not options.wait:
            raise JobError("retries needs wait=true: with wait=false the sweep exits before its jobs end")
        of_one_host = {"order": "interleaved", "reuse": True, "parallel": "auto"}
        asked = [f"{name}={spelled(value)}" for name, value in of_one_host.items() if getattr(options, name) == value]
        if asked and settings.cells_per_job == 1:
            raise JobError(
                f"{' and '.join(asked)}: works on one host only, with hydra/launcher=torchrun or with "
                "hydra.launcher.cells_per_job=all"
            )
        if options.order == "interleaved" and settings.cells_per_job:
            raise JobError("order=interleaved needs hydra.launcher.cells_per_job=all")
        self.settings, self.options = settings, options
        cluster.drop_client_variables(settings)
        self.target = Partition.find(settings)
        # The software is the cluster's too; its GPUs are unknown here, and each row names them.
        software = ("torch_version", "triton_version", "tpbench_version", "git_commit", "git_dirty")
        self.facts = {name: value for name, value in machine.facts().items() if name in software}
        self.adopted: dict[int, Attempt] = {}
        self.jobs: dict[int, str] = {}
        """By the cell's index: the job of its last attempt."""

    def recover(self, cells: Sequence[Cell]) -> dict[int, str]:
        """Store the rows of jobs that ended without one, end the jobs of abandoned attempts, and adopt the others.

        Returns, by the cell's index, the description of each job that is still queued or running. `run` waits for it.
        """
        by_key = {cell.job.key: cell for cell in cells}
        left = list(left_behind({cell.job.output_dir for cell in cells}, by_key.keys()))
        unwanted = [attempt for attempt in left if not is_wanted(attempt) and not runs_others(attempt)]
        cluster.cancel_and_wait({job_of(attempt) for attempt in unwanted})
        for attempt in unwanted:
            forget_job(attempt)
        wanted = [attempt for attempt in left if is_wanted(attempt)]
        states = cluster.final_states({job_of(attempt) for attempt in wanted})
        for attempt in wanted:
            if closed(attempt, states.get(job_of(attempt), cluster.UNKNOWN)) is None:
                cell = by_key[attempt.cell.job.key]
                self.adopted[cell.index] = replace(attempt, cell=cell)
                self.jobs[cell.index] = job_of(attempt)
        return {index: f"already submitted as Slurm job {self.jobs[index]}" for index in self.adopted}

    def run(self, attempts: Sequence[Attempt], display: Display) -> Iterator[Attempt]:
        """Submit all attempts, and yield each as it ends. Cancels all other jobs when it is closed."""
        indices = [attempt.cell.index for attempt in attempts]
        waiting = {index: self.adopted.pop(index) for index in indices if index in self.adopted}
        # The row of a failed attempt exists before its job has ended, and the job could store it once more.
        cluster.cancel_and_wait({self.jobs[index] for index in indices if index in self.jobs and index not in waiting})
        new = {attempt.cell.index: attempt for attempt in attempts if attempt.cell.index not in waiting}
        try:
            for shape, lists in self._lists([attempt.cell for attempt in new.values()]):
                begun = [[new[cell.index].begin() for cell in alike] for alike in lists]
                for job_id, submitted in self._submit(shape, begun):
                    for attempt in submitted:
                        waiting[attempt.cell.index], self.jobs[attempt.cell.index] = attempt, job_id
            for index, attempt in waiting.items():
                display.start(attempt.cell, f"job {self.jobs[index]}")
            if self.options.wait:
                yield from self._collect(waiting, display)
            left, waiting = waiting, {}  # a sweep that does not wait leaves its jobs
            for index, attempt in left.items():
                yield replace(attempt, note=f"submitted as Slurm job {self.jobs[index]}")
        finally:
            for attempt in waiting.values():
                abandon(attempt.folder)
            cluster.cancel(sorted({self.jobs[index] for index in waiting}))

    def scripts(self, cells: Sequence[Cell], folder: Path) -> list[str]:
        """Return sbatch's script of each array of these cells, if an array holds all cells with equal resources."""
        scripts = []
        for shape, lists in self._lists(cells):
            executor = self._executor(folder, shape, [[cell.job for cell in alike] for alike in lists])
            executor.parameters["map_count"] = len(lists) if len(lists) > 1 else None
            script = executor._make_submission_file_text(executor._submitit_command_str, "")
            numbers = [str(cell.index) for alike in lists for cell in alike]
            scripts.append(
                f"\n# sbatch's script of cell{'s' * (len(numbers) > 1)} {', '.join(numbers)}\n{script.strip()}"
            )
        return scripts

    def _lists(self, cells: Sequence[Cell]) -> list[tuple[Layout, list[list[Cell]]]]:
        """Return the lists of cells that each job runs, by their layout."""
        arrays: dict[Layout, list[Cell]] = defaultdict(list)
        for cell in cells:
            arrays[layout(cell.job, self.target.max_ranks_per_node(cell.job))].append(cell)
        return [(shape, _divided(alike, self.settings.cells_per_job or len(alike))) for shape, alike in arrays.items()]

    def _executor(self, folder: Path, shape: Layout, jobs: Sequence[Sequence[Job]], after: str | None = None) -> Any:
        """Return submitit's executor of an array. `after`: number of the array that must end before it begins."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from submitit import SlurmExecutor
        executor = SlurmExecutor(folder / SUBMITIT, max_num_timeout=self.settings.requeues)
        path = f"export PYTHONPATH={shlex.quote(str(torchrun.PACKAGE_ROOT))}${{PYTHONPATH:+:$PYTHONPATH}}"
        setup = [*([] if torchrun.INSTALLED else [path]), *map(_required, self.settings.setup)]
        settings, more = self.settings, dict(self.settings.sbatch)
        if after:
            more["dependency"] = ",".join(map(str, filter(None, [more.get("dependency"), f"afterany:{after}"])))
        parameters = {
            "nodes": shape.nodes,
            "ntasks_per_node": 1,  # torchrun starts the ranks
            "cpus_per_task": settings.cpus_per_task or (shape.ranks_per_node if shape.device == "cpu" else None),
            "gpus_per_node": shape.ranks_per_node if shape.device == "cuda" else None,
            "time": settings.time_limit_min or START_MIN + math.ceil(_longest_s(jobs) / 60),
            "mem": f"{math.ceil(settings.mem_gib * 1024)}M" if settings.mem_gib else None,
            "array_parallelism": settings.array_parallelism,
            "signal_delay_s": settings.signal_delay_s,
            "additional_parameters": {"requeue": True, **more},
            **{name: getattr(settings, name) for name in ("partition", "account", "qos", "constraint")},
        }
        given = {name: value for name, value in parameters.items() if value is not None}
        executor.update_parameters(job_name="tpbench", setup=setup, **given)
        return executor

    def _submit(self, shape: Layout, lists: Sequence[Sequence[Attempt]]) -> Iterator[tuple[str, Sequence[Attempt]]]:
        """Submit a job for each list of attempts, which have begun. Yield each list with the number of its job."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from submitit.core.utils import FailedJobError, FailedSubmissionError

            from tpbench.launcher.slurm.node import NodeTask
        for alike in lists:
            if shape.nodes > 1:
                create_secret(alike[0].folder)
            for attempt in alike:
                attempt.task.save(attempt.task_file)
        jobs_of_cells = [[attempt.cell.job for attempt in alike] for alike in lists]
        length = math.ceil(len(lists) / math.ceil(len(lists) / cluster.max_array_length()))
        options = replace(self.options, wait=True)
        after: str | None = None  # together, the arrays may run no more jobs at once than one of them
        for in_array in _divided(lists, length):
            executor = self._executor(lists[0][0].folder.parent, shape, jobs_of_cells, after)
            tasks = [NodeTask(tuple(str(attempt.folder) for attempt in alike), options) for alike in in_array]
            try:
                with executor.batch():
                    jobs = [executor.submit(task) for task in tasks]
            except (FailedJobError, FailedSubmissionError, OSError) as error:
                raise JobError(cluster.rejection_message(str(error))) from None
            after = jobs[0].job_id.partition("_")[0]
            for alike, job in zip(in_array, jobs, strict=True):
                for attempt in alike:
                    record(attempt, job.job_id)
                yield job.job_id, alike

    def _collect(self, waiting: dict[int, Attempt], display: Display) -> Iterator[Attempt]:
        """Yield the attempts as they get their rows, and remove them from `waiting`."""
        queried_at = float("-inf")
        states: dict[str, str] = {}
        ended: dict[str, float] = {}
        while waiting:
            now = time.monotonic()
            if now - queried_at > self.settings.poll_s:
                queried_at = now
                states |= cluster.states({self.jobs[index] for index in waiting})
                for job_id, state in states.items():
                    if state in ENDED:
                        ended.setdefault(job_id, now)
                    else:
                        ended.pop(job_id, None)  # requeued
            for index, attempt in list(waiting.items()):
                job_id = self.jobs[index]
                state = states.get(job_id, "PENDING")
                display.set_status(attempt.cell, f"job {job_id}: {cluster.described(state)}")
                delay_s = ROW_DELAY_S if state == "COMPLETED" else self.settings.poll_s
                has_ended = now - ended.get(job_id, now) > delay_s
                if (attempt.has_row or has_ended) and (done := closed(attempt, state)):
                    del waiting[index]
                    yield done
            display.tick()
            interrupts.sleep(0.2)


def _longest_s(jobs: Sequence[Sequence[Job]]) -> float:
    """Return the time that the cells of one Slurm job may take: their timeouts, or twice what several cells will need.

    A job that needs more is requeued, and continues with the cells that are left.
    """
    if max(map(len, jobs)) == 1:
        return max(job.timeout_s for (job,) in jobs)
    from tpbench.launcher.planning.forecast import Forecast  # late: it imports scipy

    forecast = Forecast.of([Cell(0, job, None) for alike in jobs for job in alike], on_this_host=False)
    return max(sum(min(job.timeout_s, 2 * (forecast.seconds(job) or job.timeout_s)) for job in alike) for alike in jobs)


def _divided(items: Sequence[Item], length: int) -> list[list[Item]]:
    """Return the items in lists of that length; the last one may be shorter."""
    return [list(items[start : start + length]) for start in range(0, len(items), length)]


def _required(line: str) -> str:
    """Return a shell line that ends the job if it fails. Its output is in the log that the row of the cell quotes."""
    failed = shlex.quote(f"this line of hydra.launcher.setup failed: {line}")
    return f"{{ {line}\n}} || {{ echo {failed} >&2; exit 1; }}"
