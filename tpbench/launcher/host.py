"""Runs cells on this host: one at a time or interleaved, in their own torchruns or in one that stays."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tpbench.job import Job
from tpbench.launcher import devices, interrupts
from tpbench.launcher.attempt import Attempt, store_left_results
from tpbench.launcher.devices import Lease
from tpbench.launcher.display import Display
from tpbench.launcher.options import SweepOptions
from tpbench.launcher.planning.plan import Cell, ThisHost
from tpbench.launcher.runner import Runner
from tpbench.launcher.torchrun import Rendezvous, Torchrun, shared_needs
from tpbench.measure import machine
from tpbench.measure.session import STEPS_FILE
from tpbench.settings import JobError


class Host(Runner):
    """Runs cells in the given order, as soon as their GPUs are free."""

    def __init__(
        self, options: SweepOptions, rendezvous: Callable[[int], Rendezvous] = lambda cell: Rendezvous()
    ) -> None:
        """`rendezvous`: where this host meets the other nodes of a Slurm job, by the index of the cell."""
        if not options.wait:
            raise JobError("wait=false is for clusters: it needs hydra/launcher=torchrun_slurm")
        self.rendezvous = rendezvous
        self.target = ThisHost(8 if options.gpu else machine.gpu_count(), gpu=options.gpu or "")
        self.facts = machine.facts()
        self.reuse, self.interleaved = options.reuse, options.order == "interleaved"

    def recover(self, cells: Sequence[Cell]) -> dict[int, str]:
        """Store the results that dead sweeps left of these cells. No job of theirs still runs: the result is empty."""
        store_left_results({cell.job.output_dir for cell in cells}, {cell.job.key for cell in cells})
        return {}

    def run(self, attempts: Sequence[Attempt], display: Display) -> Iterator[Attempt]:
        """Yield each attempt as soon as it has its row. Ends every process when the generator is closed."""
        together: dict[object, list[Attempt]] = defaultdict(list)
        for attempt in attempts:  # those of a problem start together if they are interleaved
            alone = not self.interleaved or _not_interleaved_reason(attempt.cell.job)
            together[attempt.cell.index if alone else problem_of(attempt.cell.job)].append(attempt)
        waiting = list(together.values())
        while waiting:
            cell = waiting[0][0].cell
            while (lease := devices.lease(cell.job)) is None:
                display.show(cell, "waits for GPUs that other jobs on this host use")
                interrupts.sleep(0.5)
            with contextlib.ExitStack() as stack:
                stack.callback(lease.release)
                begun = self._begin(waiting.pop(0), lease, display)
                stays = self.reuse and not own_torchrun_reason(cell.job)
                torchrun = Torchrun(begun, lease, stays, self.rendezvous(cell.index))
                stack.callback(torchrun.end)
                while torchrun.running:
                    if removed := [attempt.folder for attempt in torchrun.running if not attempt.folder.exists()]:
                        raise JobError(f"{removed[0]} was removed while its job ran: run the sweep with resume=true")
                    for attempt in torchrun.running:
                        display.follow(attempt.task.folder / STEPS_FILE)
                    yield from torchrun.poll()
                    waiting[:0], torchrun.unfinished = torchrun.unfinished, []
                    if not torchrun.running and (following := self._following(torchrun, waiting)):
                        torchrun.submit(self._begin(following, lease, display))
                    interrupts.sleep(0.02)

    def _following(self, torchrun: Torchrun, waiting: list[list[Attempt]]) -> list[Attempt]:
        """Take the first waiting attempts that an idle torchrun can run. The result is empty if there are none."""
        ended = torchrun.over or torchrun.tree.agent.poll() is not None
        for attempts in [] if ended else waiting:
            if shared_needs(attempts) == torchrun.needs and not own_torchrun_reason(attempts[0].cell.job):
                waiting.remove(attempts)
                return attempts
        return []

    def _begin(self, attempts: Sequence[Attempt], lease: Lease, display: Display) -> list[Attempt]:
        columns: dict[str, Any] = {"beside": "another-sweep"} if lease.beside_others else {}
        first = attempts[0]
        if len(attempts) > 1:
            group = f"{first.task.folder.parent.name}-{first.task.folder.name}"
            columns |= {"interleaved": group, "interleaved_cells": len(attempts)}
        elif self.interleaved:
            reason = first.task.columns.get("not_interleaved") or _not_interleaved_reason(first.cell.job)
            columns["not_interleaved"] = reason or "the sweep runs no other cell of its problem"
        for attempt in attempts:
            display.show(attempt.cell)
        return [attempt.begin(**columns) for attempt in attempts]


def problem_of(job: Job) -> tuple[tuple[str, Any], ...]:
    """Return what interleaved cells have in common: all fields but the variant and the options of single variants."""
    names = {"variant", *job.workload.option_defaults}
    return tuple(sorted((name, value) for name, value in job.flat().items() if name not in names))


def own_torchrun_reason(job: Job) -> str | None:
    """Return why no other job may run in the processes of this one, or None if others may."""
    if job.memory_limit_gib is not None:
        return "memory_limit_gib limits a whole process"
    if job.implementation.process_settings:
        return f"{job.variant} changes its process: {job.implementation.process_settings}"
    return None


def _not_interleaved_reason(job: Job) -> str | None:
    return "each iteration continues the one before" if job.scheduled else own_torchrun_reason(job)
