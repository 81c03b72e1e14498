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
from typing import Any

from tpbench.job import Job
from tpbench.launcher import interrupts, torchrun
from tpbench.launcher.attempt import Attempt, abandon
from tpbench.launcher.display import Display
from tpbench.launcher.options import SweepOptions
from tpbench.launcher.planning.plan import Cell
from tpbench.launcher.slurm import cluster
from tpbench.launcher.slurm.cluster import ENDED, JobState, SlurmSettings
from tpbench.launcher.slurm.layout import Layout, Partition, layout
from tpbench.launcher.slurm.submitted import SUBMITIT, closed, is_wanted, job_of, left_behind, mark_ended, record
from tpbench.measure import machine
from tpbench.settings import JobError, spelled
from tpbench.worker.start import create_secret

ROW_DELAY_S = 10.0
"""Time after a job's end in which its row may become visible: network file systems show new files late."""


class Slurm:
    """Runs cells as jobs of a Slurm cluster."""

    def __init__(self, settings: SlurmSettings, options: SweepOptions) -> None:
        if options.retries and not options.wait:
            raise JobError("retries needs wait=true: with wait=false the sweep exits before its jobs end")
        of_one_host = {"order": "interleaved", "reuse": True, "parallel": "auto"}
        if asked := [name for name, value in of_one_host.items() if getattr(options, name) == value]:
            said = " and ".join(f"{name}={spelled(of_one_host[name])}" for name in asked)
            raise JobError(f"{said}: works on one host only, with hydra/launcher=torchrun")
        self.settings, self.wait = settings, options.wait
        cluster.drop_client_variables(settings)
        self.target = Partition.find(settings)
        # The software is the cluster's too; its GPUs are unknown here, and each row names them.
        software = ("torch_version", "triton_version", "tpbench_version", "git_commit", "git_dirty")
        self.facts = {name: value for name, value in machine.facts().items() if name in software}
        self.adopted: dict[int, Attempt] = {}
        self.tried: dict[int, str] = {}
        """By the cell's index: the job that ran its last attempt."""

    def recover(self, cells: Sequence[Cell]) -> dict[int, str]:
        """Store the rows of jobs that ended without one, end the jobs of abandoned attempts, and adopt the others.

        Returns, by the cell's index, the description of each job that is still queued or running. `run` waits for it.
        """
        by_key = {cell.job.key: cell for cell in cells}
        wanted: dict[str, Attempt] = {}
        unwanted: dict[str, Attempt] = {}
        for attempt in left_behind({cell.job.output_dir for cell in cells}, by_key.keys()):
            (wanted if is_wanted(attempt) else unwanted)[job_of(attempt)] = attempt
        cluster.cancel_and_wait(unwanted)
        for attempt in unwanted.values():
            mark_ended(attempt)
        states = cluster.final_states(wanted)
        for job_id, attempt in wanted.items():
            if closed(attempt, states.get(job_id, "UNKNOWN")) is None:
                cell = by_key[attempt.cell.job.key]
                self.adopted[cell.index] = replace(attempt, cell=cell)
        return {index: f"already submitted as Slurm job {job_of(attempt)}" for index, attempt in self.adopted.items()}

    def run(self, attempts: Sequence[Attempt], display: Display) -> Iterator[Attempt]:
        """Submit all attempts, and yield each as its job ends. Cancels all other jobs when it is closed."""
        # The row of a failed attempt exists before its job has ended, and the job could store it once more.
        indices = [attempt.cell.index for attempt in attempts]
        cluster.cancel_and_wait(self.tried.pop(index) for index in indices if index in self.tried)
        adopted = [self.adopted.pop(index) for index in indices if index in self.adopted]
        waiting = {job_of(attempt): attempt for attempt in adopted}
        arrays: dict[Layout, list[Attempt]] = defaultdict(list)
        for attempt in attempts:
            if not any(attempt.cell.index == other.cell.index for other in adopted):
                job = attempt.cell.job
                arrays[layout(job, self.target.max_ranks_per_node(job))].append(attempt)
        try:
            for shape, alike in arrays.items():
                for array in self._submit(shape, [attempt.begin() for attempt in alike]):
                    waiting |= array
            for job_id, attempt in waiting.items():
                display.start(attempt.cell, f"job {job_id}")
            if self.wait:
                yield from self._collect(waiting, display)
            left, waiting = waiting, {}  # a sweep that does not wait leaves its jobs
            for job_id, attempt in left.items():
                yield replace(attempt, note=f"submitted as Slurm job {job_id}")
        finally:
            for attempt in waiting.values():
                abandon(attempt.folder)
            cluster.cancel(list(waiting))

    def scripts(self, cells: Sequence[Cell], folder: Path) -> list[str]:
        """Return sbatch's script of each array of these cells, if the arrays hold all cells of a layout."""
        arrays: dict[Layout, list[Cell]] = defaultdict(list)
        for cell in cells:
            arrays[layout(cell.job, self.target.max_ranks_per_node(cell.job))].append(cell)
        scripts = []
        for shape, alike in arrays.items():
            executor = self._executor(folder, shape, [cell.job for cell in alike])
            executor.parameters["map_count"] = len(alike) if len(alike) > 1 else None
            script = executor._make_submission_file_text(executor._submitit_command_str, "")
            numbers = ", ".join(str(cell.index) for cell in alike)
            scripts.append(f"\n# sbatch's script of cell{'s' * (len(alike) > 1)} {numbers}\n{script.strip()}")
        return scripts

    def _executor(self, folder: Path, shape: Layout, jobs: Sequence[Job], after: str | None = None) -> Any:
        """Return submitit's executor of an array. `after`: number of the array that must end before it begins."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from submitit import SlurmExecutor
        executor = SlurmExecutor(folder / SUBMITIT, max_num_timeout=self.settings.requeues)
        path = f"export PYTHONPATH={shlex.quote(str(torchrun.PACKAGE_ROOT))}${{PYTHONPATH:+:$PYTHONPATH}}"
        setup = [*([] if torchrun.INSTALLED else [path]), *map(_required, self.settings.setup)]
        resources = shape.resources(self.settings, max(job.timeout_s for job in jobs), after)
        executor.update_parameters(job_name="tpbench", setup=setup, **resources)
        return executor

    def _submit(self, shape: Layout, attempts: Sequence[Attempt]) -> Iterator[dict[str, Attempt]]:
        """Submit attempts that have begun, and yield those of one array after the other, by the job's number."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from submitit.core.utils import FailedJobError, FailedSubmissionError

            from tpbench.launcher.slurm.node import NodeTask
        for attempt in attempts:
            if shape.nodes > 1:
                create_secret(attempt.folder)
            attempt.task.save(attempt.task_file)
        jobs_of_cells = [attempt.cell.job for attempt in attempts]
        arrays = math.ceil(len(attempts) / cluster.max_array_length())
        length = math.ceil(len(attempts) / arrays)
        after: str | None = None  # together, the arrays may run no more jobs at once than one of them
        for start in range(0, len(attempts), length):
            executor = self._executor(attempts[0].folder.parent, shape, jobs_of_cells, after)
            in_array = attempts[start : start + length]
            try:
                with executor.batch():
                    jobs = [executor.submit(NodeTask(str(attempt.folder))) for attempt in in_array]
            except (FailedJobError, FailedSubmissionError, OSError) as error:
                raise JobError(cluster.rejection_message(str(error))) from None
            after = jobs[0].job_id.partition("_")[0]
            for attempt, job in zip(in_array, jobs, strict=True):
                record(attempt.folder, job.job_id)
            yield {job.job_id: attempt for attempt, job in zip(in_array, jobs, strict=True)}

    def _collect(self, waiting: dict[str, Attempt], display: Display) -> Iterator[Attempt]:
        """Yield the attempts as they get their rows, and remove them from `waiting`."""
        queried_at = float("-inf")
        states: dict[str, JobState] = {}
        ended: dict[str, float] = {}
        while waiting:
            now = time.monotonic()
            if now - queried_at > self.settings.poll_s:
                queried_at = now
                states |= cluster.states(waiting)
                for job_id, state in states.items():
                    if state in ENDED:
                        ended.setdefault(job_id, now)
                    else:
                        ended.pop(job_id, None)  # requeued
            for job_id, attempt in list(waiting.items()):
                state = states.get(job_id, JobState("PENDING"))
                display.set_status(attempt.cell, f"job {job_id}: {state.text}")
                delay_s = ROW_DELAY_S if state == "COMPLETED" else self.settings.poll_s
                has_ended = now - ended.get(job_id, now) > delay_s
                if (attempt.has_row or has_ended) and (done := closed(attempt, state)):
                    del waiting[job_id]
                    self.tried[attempt.cell.index] = job_id
                    yield done
            display.tick()
            interrupts.sleep(0.2)


def _required(line: str) -> str:
    """Return a shell line that ends the job if it fails. Its output is in the log that the row of the cell quotes."""
    failed = shlex.quote(f"this line of hydra.launcher.setup failed: {line}")
    return f"{{ {line}\n}} || {{ echo {failed} >&2; exit 1; }}"
