"""Cells on this host: one at a time or side by side, each with a torchrun of its own or in a group that stays."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from tpbench.conduct import Conduct
from tpbench.fields import JobError
from tpbench.launcher import torchrun
from tpbench.launcher.attempt import Attempt, Begin, Outcome
from tpbench.launcher.cold import ColdJob
from tpbench.launcher.devices import Devices, Lease
from tpbench.launcher.display import Display
from tpbench.launcher.plan import Cell, ThisHost
from tpbench.launcher.process import end_orphans
from tpbench.launcher.warm import WarmGroup
from tpbench.measure import machine

POLL_S = 0.02


class Running(Protocol):
    """A job at work."""

    attempt: Attempt

    def poll(self) -> Outcome | None:
        """Its outcome once it has one."""

    def end(self) -> None:
        """End it and everything it started."""


@dataclass(frozen=True)
class Lane:
    """A job and the devices that it has."""

    job: Running
    lease: Lease


class Host:
    """Runs cells in the order given, as far as their devices allow."""

    def __init__(self, how: Conduct) -> None:
        if not how.wait:
            raise JobError("wait=false is for clusters: it needs hydra/launcher=torchrun_slurm")
        self.place = ThisHost(machine.gpu_count())
        self.facts = machine.facts()
        self.parallel, self.reuse = how.parallel == "auto", how.reuse
        self.devices = Devices(split_cpu=self.parallel)
        self.lanes: list[Lane] = []
        self.groups: dict[tuple[object, ...], WarmGroup] = {}

    def recover(self, cells: Sequence[Cell]) -> dict[int, str]:
        """End what a dead sweep may have left of these cells."""
        end_orphans()
        return {}

    def run(self, cells: Sequence[Cell], begin: Begin, display: Display) -> Iterator[Outcome]:
        """Yields each cell's outcome as soon as it has one. Ends what it started when it is left."""
        waiting = list(cells)
        try:
            while waiting or self.lanes:
                for cell in list(waiting):
                    if self.lanes and not self.parallel:
                        break
                    if (lease := self.devices.lease(cell.job)) is not None:
                        waiting.remove(cell)
                        self._start(cell, begin, lease, display)
                for lane in list(self.lanes):
                    if outcome := lane.job.poll():
                        self.lanes.remove(lane)
                        self.devices.give_back(lane.lease)
                        yield outcome
                display.tick()
                time.sleep(POLL_S)
        finally:
            for lane in self.lanes:
                lane.job.end()
                self.devices.give_back(lane.lease)
            for group in self.groups.values():
                group.tree.end()
            self.lanes, self.groups = [], {}

    def _start(self, cell: Cell, begin: Begin, lease: Lease, display: Display) -> None:
        attempt = begin(cell)
        attempt.folder.mkdir()
        for lane in self.lanes:
            lane.job.attempt.row.runs_beside(attempt.row.row_id)
            attempt.row.runs_beside(lane.job.attempt.row.row_id)
        if lease.beside_others:
            attempt.row.runs_beside("another-sweep")
        on = f" on {','.join(each.visible for each in lease.devices)}" if self.parallel else ""
        display.start(cell, f"running{on}")
        job = self._group(attempt, lease).submit(attempt) if self.reuse else ColdJob(attempt, lease)
        self.lanes.append(Lane(job, lease))

    def _group(self, attempt: Attempt, lease: Lease) -> WarmGroup:
        """A living group for the job: of its world size, with its environment, on its devices."""
        job = attempt.cell.job
        env = torchrun.environment(job, "", cores=len(lease.cores)) | dict(lease.environment)
        kind = (job.world_size, lease.devices, frozenset(env.items()))
        if kind not in self.groups or not self.groups[kind].alive:
            folder = attempt.folder.parent / f"group-{attempt.folder.name}"
            self.groups[kind] = WarmGroup(attempt, env, lease, folder)
        return self.groups[kind]
