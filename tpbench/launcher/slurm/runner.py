"""Runs the cells of a sweep as Slurm jobs: submits them, waits, and returns their outcomes."""

from __future__ import annotations

import itertools
import shlex
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tpbench.launcher import torchrun
from tpbench.launcher.cells.attempt import Attempt, StartAttempt
from tpbench.launcher.cells.leftovers import abandon
from tpbench.launcher.cells.outcome import Outcome
from tpbench.launcher.display import Display
from tpbench.launcher.options import SweepOptions
from tpbench.launcher.planning.plan import Cell
from tpbench.launcher.slurm import cluster
from tpbench.launcher.slurm.arrays import split_into_arrays
from tpbench.launcher.slurm.cluster import ENDED, JobState
from tpbench.launcher.slurm.layout import Layout, layout
from tpbench.launcher.slurm.partition import Partition
from tpbench.launcher.slurm.settings import SlurmSettings
from tpbench.launcher.slurm.submitted import SUBMITIT, Submitted, left_behind, record
from tpbench.measure import machine
from tpbench.settings import JobError, spelled
from tpbench.worker.start import create_secret

ROW_DELAY_S = 10.0
"""Time after a job's end in which its row may become visible: network file systems show new files late."""


class Slurm:
    """Runs cells as jobs of a Slurm cluster."""

    def __init__(self, settings: SlurmSettings, options: SweepOptions) -> None:
        if (options.retries or options.throttle == "retry") and not options.wait:
            name = "retries" if options.retries else "throttle=retry"
            raise JobError(f"{name} needs wait=true: with wait=false the sweep exits before its jobs end")
        of_one_host = {"order": "interleaved", "reuse": True, "parallel": "auto"}
        if asked := [name for name, value in of_one_host.items() if getattr(options, name) == value]:
            said = " and ".join(f"{name}={spelled(of_one_host[name])}" for name in asked)
            raise JobError(f"{said}: works on one host only, with hydra/launcher=torchrun")
        self.settings, self.wait = settings, options.wait
        self.target = Partition.find(settings)
        # The software is the cluster's too; its GPUs are unknown here, and each row names them.
        software = ("torch_version", "triton_version", "tpbench_version", "git_commit", "git_dirty")
        self.facts = {name: value for name, value in machine.facts().items() if name in software}
        self.adopted: dict[int, Submitted] = {}
        self.tried: dict[int, str] = {}
        """By the cell's index: the job that ran its last attempt."""

    def recover(self, cells: Sequence[Cell]) -> dict[int, str]:
        """Store the rows of jobs that ended without one, end the jobs of abandoned attempts, and adopt the others.

        Returns, by the cell's index, the description of each job that is still queued or running. `run` waits for it.
        """
        by_key = {cell.job.key: cell for cell in cells}
        left = list(left_behind({cell.job.output_dir for cell in cells}, by_key.keys()))
        unwanted = [each for each in left if not each.wanted]
        cluster.cancel_and_wait(each.job_id for each in unwanted)
        for each in unwanted:
            each.mark_ended()
        left = [each for each in left if each.wanted]
        states = cluster.final_states(each.job_id for each in left)
        for each in left:
            state = states.get(each.job_id, "UNKNOWN")
            if each.outcome(state) is None:
                cell = by_key[each.attempt.cell.job.key]
                self.adopted[cell.index] = replace(each, attempt=replace(each.attempt, cell=cell))
        return {index: f"already submitted as Slurm job {each.job_id}" for index, each in self.adopted.items()}

    def run(self, cells: Sequence[Cell], begin: StartAttempt, display: Display) -> Iterator[Outcome]:
        """Submit all cells, and yield each outcome as its job ends. Cancels all other jobs when it is closed."""
        # The row of a failed attempt exists before its job has ended, and the job could store it once more.
        cluster.cancel_and_wait(self.tried.pop(cell.index) for cell in cells if cell.index in self.tried)
        waiting: list[Submitted] = [self.adopted.pop(cell.index) for cell in cells if cell.index in self.adopted]
        adopted = {each.attempt.cell.index for each in waiting}
        arrays: dict[Layout, list[Attempt]] = defaultdict(list)
        for cell in cells:
            if cell.index not in adopted:
                arrays[layout(cell.job, self.target.max_ranks_per_node(cell.job))].append(begin(cell))
        try:
            for shape, attempts in arrays.items():
                for array in self._submit(shape, attempts):
                    waiting += array
            for each in waiting:
                display.start(each.attempt.cell, f"job {each.job_id}")
            if self.wait:
                yield from self._collect(waiting, display)
            else:
                done, waiting = waiting, []
                for each in done:
                    yield Outcome(
                        each.attempt.cell,
                        None,
                        f"submitted as Slurm job {each.job_id}",
                        sweep=each.attempt.folder.parent,
                    )
        finally:
            for each in waiting:
                abandon(each.attempt.folder)
            cluster.cancel([each.job_id for each in waiting])

    def _submit(self, shape: Layout, attempts: Sequence[Attempt]) -> Iterator[list[Submitted]]:
        """Submit the attempts, and yield the jobs of one array after the other."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from submitit import SlurmExecutor
            from submitit.core.utils import FailedJobError, FailedSubmissionError

            from tpbench.launcher.slurm.task import NodeTask
        for attempt in attempts:
            attempt.create_folder()
            if shape.nodes > 1:
                create_secret(attempt.folder)
            attempt.task.save(attempt.task_file)
        executor = SlurmExecutor(attempts[0].folder.parent / SUBMITIT, max_num_timeout=self.settings.requeues)
        path = f"export PYTHONPATH={shlex.quote(str(torchrun.PACKAGE_ROOT))}${{PYTHONPATH:+:$PYTHONPATH}}"
        setup = [*([] if torchrun.INSTALLED else [path]), *self.settings.setup]
        timeout_s = max(each.cell.job.timeout_s for each in attempts)
        left = iter(attempts)
        arrays: list[str] = []
        for part in split_into_arrays(len(attempts), cluster.max_array_length(), self.settings.array_parallelism):
            after = None if part.after is None else arrays[part.after]
            resources = shape.resources(self.settings, timeout_s, part.parallelism, after)
            executor.update_parameters(job_name="tpbench", setup=setup, **resources)
            these = list(itertools.islice(left, part.size))
            try:
                with executor.batch():
                    jobs = [executor.submit(NodeTask(str(each.folder))) for each in these]
            except (FailedJobError, FailedSubmissionError, OSError) as error:
                raise JobError(cluster.rejection_message(str(error))) from None
            arrays.append(jobs[0].job_id.partition("_")[0])
            for attempt, job in zip(these, jobs, strict=True):
                record(attempt.folder, job.job_id)
            yield [Submitted(attempt, job.job_id) for attempt, job in zip(these, jobs, strict=True)]

    def _collect(self, waiting: list[Submitted], display: Display) -> Iterator[Outcome]:
        """Yield the outcomes. Removes each job from `waiting` once it has its outcome."""
        queried_at = float("-inf")
        states: dict[str, JobState] = {}
        ended: dict[str, float] = {}
        while waiting:
            now = time.monotonic()
            if now - queried_at > self.settings.poll_s:
                queried_at = now
                states |= cluster.states(each.job_id for each in waiting)
                for job_id, state in states.items():
                    if state in ENDED:
                        ended.setdefault(job_id, now)
                    else:
                        ended.pop(job_id, None)  # requeued
            for each in list(waiting):
                state = states.get(each.job_id, JobState("PENDING"))
                display.set_status(each.attempt.cell, f"job {each.job_id}: {state.text}")
                delay_s = ROW_DELAY_S if state == "COMPLETED" else self.settings.poll_s
                has_ended = now - ended.get(each.job_id, now) > delay_s
                if (each.attempt.has_row or has_ended) and (outcome := each.outcome(state)):
                    waiting.remove(each)
                    self.tried[each.attempt.cell.index] = each.job_id
                    yield outcome
            display.read_phases(each.attempt for each in waiting)
            display.tick()
            time.sleep(0.2)
