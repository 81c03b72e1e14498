"""Cells on this host: one at a time, in turns or side by side, each with a torchrun of its own or in one that stays."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from tpbench.launcher import torchrun
from tpbench.launcher.attempt import Attempt, Begin, Outcome
from tpbench.launcher.cold import ColdJob
from tpbench.launcher.devices import Devices, Lease
from tpbench.launcher.display import Display
from tpbench.launcher.interleaved import Interleaved, problem_of
from tpbench.launcher.options import Conduct
from tpbench.launcher.plan import Cell
from tpbench.launcher.process import end_orphans
from tpbench.launcher.target import ThisHost
from tpbench.launcher.warm import WarmGroup, WarmJob
from tpbench.measure import machine
from tpbench.settings import JobError

POLL_S = 0.02


class Work(Protocol):
    """A cell, or several that take turns."""

    over: bool
    """Nothing of it is left."""

    @property
    def attempts(self) -> Sequence[Attempt]:
        """Those at work."""

    def poll(self) -> list[Outcome]:
        """Outcomes that are new."""

    def end(self) -> None:
        """End all that it started."""


class Single:
    """A job by itself."""

    def __init__(self, job: ColdJob | WarmJob) -> None:
        self.job, self.attempts, self.over = job, [job.attempt], False

    def poll(self) -> list[Outcome]:
        """Its outcome once it has one."""
        outcome = self.job.poll()
        self.over = outcome is not None
        return [outcome] if outcome else []

    def end(self) -> None:
        """End it."""
        self.job.end()


@dataclass(frozen=True)
class Lane:
    """What is at work and the devices that it has."""

    work: Work
    lease: Lease


class Host:
    """Runs cells in the order given, as far as their devices allow."""

    def __init__(self, how: Conduct) -> None:
        if not how.wait:
            raise JobError("wait=false is for clusters: it needs hydra/launcher=torchrun_slurm")
        self.target = ThisHost(machine.gpu_count())
        self.facts = machine.facts()
        self.parallel, self.reuse = how.parallel == "auto", how.reuse
        self.interleaved = how.order == "interleaved"
        self.devices = Devices(split_cpu=self.parallel)
        self.lanes: list[Lane] = []
        self.groups: dict[tuple[object, ...], WarmGroup] = {}

    def recover(self, cells: Sequence[Cell]) -> dict[int, str]:
        """End what a dead sweep may have left of these cells."""
        end_orphans(cell.job.output_dir for cell in cells)
        return {}

    def run(self, cells: Sequence[Cell], begin: Begin, display: Display) -> Iterator[Outcome]:
        """Yields each cell's outcome as soon as it has one. Ends what it started when it is left."""
        waiting = self._units(cells)
        try:
            while waiting or self.lanes:
                refused: set[tuple[str, int]] = set()
                for unit in list(waiting):
                    if self.lanes and not self.parallel:
                        break
                    asks = unit[0].job.device, unit[0].job.world_size
                    if asks in refused:
                        continue
                    if (lease := self.devices.lease(unit[0].job)) is None:
                        refused.add(asks)
                        continue
                    waiting.remove(unit)
                    self.lanes.append(Lane(self._start(unit, begin, lease, display), lease))
                if waiting and not self.lanes:
                    display.blocked(waiting[0][0])
                    for group in self.groups.values():
                        group.rest()
                for lane in list(self.lanes):
                    outcomes = lane.work.poll()
                    if lane.work.over:
                        self.lanes.remove(lane)
                        self.devices.release(lane.lease)
                    yield from outcomes
                display.read_phases(each for lane in self.lanes for each in lane.work.attempts)
                display.tick()
                time.sleep(POLL_S)
        finally:
            for lane in self.lanes:
                lane.work.end()
                self.devices.release(lane.lease)
            for group in self.groups.values():
                group.tree.end()
            self.lanes, self.groups = [], {}

    def _units(self, cells: Sequence[Cell]) -> list[list[Cell]]:
        """Cells that take turns, together; others by themselves."""
        if not self.interleaved:
            return [[cell] for cell in cells]
        problems: dict[object, list[Cell]] = defaultdict(list)
        for cell in cells:
            problems[cell.index if cell.job.workload.scheduled else problem_of(cell.job)].append(cell)
        return list(problems.values())

    def _start(self, unit: Sequence[Cell], begin: Begin, lease: Lease, display: Display) -> Work:
        if len(unit) > 1:
            return Interleaved(
                unit,
                functools.partial(self._begin, begin=begin, lease=lease, display=display),
                functools.partial(self._submit, lease=lease),
            )
        attempt = self._begin(unit[0], begin, lease, display)
        if self.interleaved:
            attempt.row.known["not_interleaved"] = (
                "each of its iterations goes on from the last"
                if attempt.cell.job.workload.scheduled
                else "no other cell of its problem is to run"
            )
        return Single(self._submit(attempt, 0, lease) if self.reuse else ColdJob(attempt, lease))

    def _begin(self, cell: Cell, begin: Begin, lease: Lease, display: Display) -> Attempt:
        attempt = begin(cell)
        attempt.folder.mkdir()
        for other in [each for lane in self.lanes if lane.lease is not lease for each in lane.work.attempts]:
            other.row.runs_beside(attempt.row.row_id)
            attempt.row.runs_beside(other.row.row_id)
        if lease.beside_others:
            attempt.row.runs_beside("another-sweep")
        on = f" on {','.join(each.visible for each in lease.devices)}" if self.parallel else ""
        display.start(cell, f"running{on}")
        return attempt

    def _submit(self, attempt: Attempt, number: int, lease: Lease) -> WarmJob:
        """Hand it to a living group of its world size, with its environment, on its devices. `number`: which of those
        alike, where several cells are at work on the same devices."""
        job = attempt.cell.job
        env = torchrun.environment(job, "", cores=len(lease.cores)) | dict(lease.environment)
        kind = (job.world_size, lease.devices, frozenset(env.items()), number)
        if kind not in self.groups or not self.groups[kind].alive:
            folder = attempt.folder.parent / f"group-{attempt.folder.name}"
            self.groups[kind] = WarmGroup(attempt, env, lease, folder)
        for each, group in self.groups.items():
            if each != kind:
                group.rest(lease.devices)
        return self.groups[kind].submit(attempt)
