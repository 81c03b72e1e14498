"""Runs cells on this host: one at a time, interleaved or in parallel, each with its own torchrun or in a reused one."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from tpbench.launcher import torchrun
from tpbench.launcher.cells.attempt import Attempt, StartAttempt
from tpbench.launcher.cells.leftovers import store_left_results
from tpbench.launcher.cells.outcome import Outcome
from tpbench.launcher.devices.leases import Devices, Lease
from tpbench.launcher.display import Display
from tpbench.launcher.host.cold import ColdJob
from tpbench.launcher.host.interleaved import InterleavedCells, problem_of
from tpbench.launcher.host.warm import ReusedTorchrun, WarmJob
from tpbench.launcher.options import SweepOptions
from tpbench.launcher.planning.plan import Cell, ThisHost
from tpbench.launcher.process import end_orphans
from tpbench.measure import machine
from tpbench.settings import JobError

POLL_S = 0.02


class RunningCells(Protocol):
    """One running cell, or several that are interleaved."""

    over: bool
    """True if no process of these cells is left."""

    @property
    def attempts(self) -> Sequence[Attempt]:
        """The attempts that are running."""

    def poll(self) -> list[Outcome]:
        """Return the outcomes that are new."""

    def end(self) -> None:
        """End all processes of these cells."""


class SingleCell:
    """One running cell."""

    def __init__(self, job: ColdJob | WarmJob) -> None:
        self.job, self.attempts, self.over = job, [job.attempt], False

    def poll(self) -> list[Outcome]:
        """Return the outcome, once the cell has one."""
        outcome = self.job.poll()
        self.over = outcome is not None
        return [outcome] if outcome else []

    def end(self) -> None:
        """End the cell's processes."""
        self.job.end()


@dataclass(frozen=True)
class LeasedCells:
    """Running cells and the devices that are leased to them."""

    running: RunningCells
    lease: Lease


class Host:
    """Runs cells in the given order, as far as free devices allow."""

    def __init__(self, options: SweepOptions) -> None:
        if not options.wait:
            raise JobError("wait=false is for clusters: it needs hydra/launcher=torchrun_slurm")
        self.target = ThisHost(machine.gpu_count(), max_ranks_per_core=options.max_ranks_per_core)
        self.facts = machine.facts()
        self.parallel, self.reuse = options.parallel == "auto", options.reuse
        self.interleaved = options.order == "interleaved"
        self.devices = Devices(split_cpu=self.parallel)
        self.leased_cells: list[LeasedCells] = []
        self.torchruns: dict[tuple[object, ...], ReusedTorchrun] = {}
        """The torchruns that are reused, by what a job must have in common with them."""

    def recover(self, cells: Sequence[Cell]) -> dict[int, str]:
        """End the processes that a dead sweep left of these cells, and store the results that it left."""
        output_dirs = {cell.job.output_dir for cell in cells}
        end_orphans(output_dirs)
        store_left_results(output_dirs, {cell.job.key for cell in cells})
        return {}

    def run(self, cells: Sequence[Cell], begin: StartAttempt, display: Display) -> Iterator[Outcome]:
        """Yield the outcome of each cell as soon as it has one. Ends every process when the generator is closed."""
        waiting = self._cells_started_together(cells)
        try:
            while waiting or self.leased_cells:
                self._start_waiting(waiting, begin, display)
                if waiting and not self.leased_cells:
                    display.blocked(waiting[0][0])
                    for reused in self.torchruns.values():
                        reused.release()
                yield from self._poll()
                display.read_phases(attempt for leased in self.leased_cells for attempt in leased.running.attempts)
                display.tick()
                time.sleep(POLL_S)
        finally:
            for leased in self.leased_cells:
                leased.running.end()
                self.devices.release(leased.lease)
            for reused in self.torchruns.values():
                reused.tree.end()
            self.leased_cells, self.torchruns = [], {}

    def _start_waiting(self, waiting: list[list[Cell]], begin: StartAttempt, display: Display) -> None:
        """Start waiting cells in order, as far as devices are free.

        Each item of `waiting` holds cells that start together. Without parallel=auto only one item runs at a time.
        """
        too_few: set[tuple[str, int]] = set()
        for cells in list(waiting):
            if self.leased_cells and not self.parallel:
                break
            job = cells[0].job
            needs = job.device, job.world_size
            if needs in too_few:
                continue
            if (lease := self.devices.lease(job)) is None:
                too_few.add(needs)
                continue
            waiting.remove(cells)
            self.leased_cells.append(LeasedCells(self._start(cells, begin, lease, display), lease))

    def _poll(self) -> Iterator[Outcome]:
        """Yield the new outcomes of all running cells. Release the devices of those that have ended."""
        for leased in list(self.leased_cells):
            _require_folders(leased.running.attempts)
            outcomes = leased.running.poll()
            if leased.running.over:
                self.leased_cells.remove(leased)
                self.devices.release(leased.lease)
            yield from outcomes

    def _cells_started_together(self, cells: Sequence[Cell]) -> list[list[Cell]]:
        """Return the cells that start together: those of a problem if they are interleaved, else single cells."""
        if not self.interleaved:
            return [[cell] for cell in cells]
        problems: dict[object, list[Cell]] = defaultdict(list)
        for cell in cells:
            problems[cell.index if cell.job.scheduled else problem_of(cell.job)].append(cell)
        return list(problems.values())

    def _start(self, cells: Sequence[Cell], begin: StartAttempt, lease: Lease, display: Display) -> RunningCells:
        if len(cells) > 1:
            return InterleavedCells(
                cells,
                functools.partial(self._begin, begin=begin, lease=lease, display=display),
                functools.partial(self._submit, lease=lease),
            )
        attempt = self._begin(cells[0], begin, lease, display)
        if self.interleaved:
            if attempt.cell.job.scheduled:
                reason = "each iteration continues the one before"
            else:
                reason = "the sweep runs no other cell of its problem"
            attempt = attempt.with_columns(not_interleaved=reason)
        return SingleCell(self._submit(attempt, 0, lease) if self.reuse else ColdJob(attempt, lease))

    def _begin(self, cell: Cell, begin: StartAttempt, lease: Lease, display: Display) -> Attempt:
        attempt = begin(cell)
        attempt.create_folder()
        others = (leased for leased in self.leased_cells if leased.lease is not lease)
        for other in [running for leased in others for running in leased.running.attempts]:
            other.ran_beside(attempt.task.row_id)
            attempt.ran_beside(other.task.row_id)
        if lease.beside_others:
            attempt.ran_beside("another-sweep")
        on = f" on {','.join(device.visible for device in lease.devices)}" if self.parallel else ""
        display.start(cell, f"running{on}")
        return attempt

    def _submit(self, attempt: Attempt, number: int, lease: Lease) -> WarmJob:
        """Run the attempt in a living torchrun with its world size, environment and devices, or in a new one.

        `number` distinguishes such torchruns if several interleaved cells share the devices.
        """
        job = attempt.cell.job
        env = torchrun.environment(job, "", cores=len(lease.cores)) | dict(lease.environment)
        torchrun_key = (job.world_size, lease.devices, frozenset(env.items()), number)
        if torchrun_key not in self.torchruns or not self.torchruns[torchrun_key].alive:
            folder = attempt.folder.parent / f"group-{attempt.folder.name}"
            self.torchruns[torchrun_key] = ReusedTorchrun(attempt, env, lease, folder)
        for key, reused in self.torchruns.items():
            if key != torchrun_key:
                reused.release(lease.devices)
        return self.torchruns[torchrun_key].submit(attempt)


def _require_folders(attempts: Sequence[Attempt]) -> None:
    """Raise JobError if the folder of a running attempt is gone: its ranks could neither save a result nor end."""
    for attempt in attempts:
        if not attempt.folder.exists():
            raise JobError(
                f"{attempt.folder} was removed while its job ran, so the sweep has ended; run it again with resume=true"
            )
