"""`dry_run=true`: the plan of a sweep, with what each cell is expected to take."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from tpbench.console import machine
from tpbench.job import Job
from tpbench.predict.cells import measured, predictable
from tpbench.predict.memory import RESERVE_GIB
from tpbench.predict.model import VariantModel, models
from tpbench.predict.oom import predicted_oom
from tpbench.results.read import load
from tpbench.settings import JobError

if TYPE_CHECKING:
    from tpbench.launcher.plan import Cell

REFERENCE = "outputs/reference"
START_S = 25.0
"""Processes up and torch imported, where no row says better."""


def foretell(cells: Sequence[Cell]) -> str:
    """The plan as text, from the rows in the cells' output folders and from the reference rows."""
    return describe(cells, _rows(cells), machine.gpu_memory_gib())


def without_predicted_oom(cells: Sequence[Cell]) -> list[Cell]:
    """The cells, with those that are predicted to run out of memory made ones that are skipped, saying why."""
    known, memory = Expectations(_rows(cells)), machine.gpu_memory_gib()
    made = []
    for cell in cells:
        reason = None if cell.obstacle else known.oom(cell.job, memory)
        made.append(replace(cell, obstacle=f"{reason} (skip_predicted_oom=true)") if reason else cell)
    return made


def _rows(cells: Sequence[Cell]) -> pd.DataFrame | None:
    """What was measured before, as far as it can be read without a word."""
    places = [*{cell.job.output_dir for cell in cells}, REFERENCE]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        there = [place for place in places if Path(place).exists()]
        return load(there) if there else None


def describe(cells: Sequence[Cell], rows: pd.DataFrame | None = None, gpu_memory_gib: float | None = None) -> str:
    """The plan as text: a line a cell, then the sum.

    `rows`: what was measured before (`tpbench.load`), from which times and shortages of memory are expected.
    `gpu_memory_gib`: memory of a GPU of this machine; without it and without memory_limit_gib no OOM is foretold.
    """
    known = Expectations(rows)
    grid = [["cell", "job", "device", "expected", ""]]
    total, unknown = 0.0, 0
    for cell in cells:
        remark, seconds = _expect(cell, known, gpu_memory_gib)
        total += seconds or 0.0
        unknown += seconds is None
        ranks = cell.job.world_size
        device = f"{ranks} GPU{'s' * (ranks > 1)}" if cell.job.device == "cuda" else f"cpu, {ranks} ranks"
        time = "unknown" if seconds is None else f"{seconds / 60:.1f} min" if seconds else "-"
        grid.append([str(cell.index), str(cell), device, time, remark])
    widths = [max(len(line[column]) for line in grid) for column in range(len(grid[0]))]
    lines = ["  ".join(item.ljust(width) for item, width in zip(line, widths, strict=True)).rstrip() for line in grid]
    running = sum(cell.obstacle is None and cell.same_as is None for cell in cells)
    most = max((cell.job.world_size for cell in cells if cell.job.device == "cuda" and not cell.obstacle), default=0)
    gpus = f", at most {most} GPU{'s' * (most > 1)} for one" if most else ""
    lines.append("")
    about = f"about {total / 60:.1f} minutes one after the other"
    if unknown:
        about = "of unknown length" if unknown == running else f"{about}, and {unknown} of unknown length"
    lines.append(f"{len(cells)} cell{'s' * (len(cells) != 1)}, {running} to run{gpus}, {about}. Nothing was run.")
    return "\n".join(lines) + "\n"


def _expect(cell: Cell, known: Expectations, gpu_memory_gib: float | None) -> tuple[str, float | None]:
    """What to say of a cell, and its seconds, None where they are unknown."""
    if cell.obstacle:
        return f"skipped: {cell.obstacle}", 0.0
    if cell.same_as is not None:
        return f"the same job as cell {cell.same_as}", 0.0
    return known.oom(cell.job, gpu_memory_gib) or "", known.seconds(cell.job)


class Expectations:
    """What rows measured before let one expect of jobs. `skip_predicted_oom=true` asks `oom`."""

    def __init__(self, rows: pd.DataFrame | None) -> None:
        self.wall_s: dict[str, float] = {}
        self.typical_s: dict[tuple[str, int, str], float] = {}
        self.models: dict[str, Mapping[str, VariantModel]] = {}
        if rows is None or rows.empty:
            return
        done = rows[rows["wall_s"].notna() & (rows["status"] == "ok")]
        self.wall_s = dict(done.groupby("key")["wall_s"].last())
        self.typical_s = dict(done.groupby(["workload", "world_size", "device"])["wall_s"].median())
        for name, workload in predictable().items():
            with contextlib.suppress(JobError):  # nothing was measured on a GPU: then nothing is foretold
                self.models[name] = models(measured(rows, workload))

    def seconds(self, job: Job) -> float | None:
        """What a job took before, or what its like took, or the budget of its clocks and a start. None of one whose
        problem says how many iterations it has, if it did not run before: others say nothing of how long they take."""
        if job.workload.scheduled:
            return self.wall_s.get(job.key)
        typical = self.typical_s.get((job.workload.name, job.world_size, job.device))
        guess = START_S + (2 if job.device == "cuda" else 1) * job.measure.time_budget_s
        return float(self.wall_s.get(job.key) or typical or guess + _interpreting(job))

    def oom(self, job: Job, gpu_memory_gib: float | None) -> str | None:
        """Why a job is predicted to run out of memory, or None."""
        free = job.memory_limit_gib or (gpu_memory_gib and gpu_memory_gib - RESERVE_GIB)
        if job.device != "cuda" or not free or job.workload.cost_model is None:
            return None
        size = job.workload.cost_model().size_of(job.flat())
        return None if size is None else predicted_oom(self.models.get(job.workload.name, {}), head(job), size, free)


def _interpreting(job: Job) -> float:
    """Return the seconds that Triton's interpreter takes for a pass."""
    if job.device != "cpu" or not job.implementation.uses_triton or job.workload.cost_model is None:
        return 0.0
    cost_model = job.workload.cost_model()
    size = cost_model.size_of(job.flat())
    return (
        0.0 if size is None else cost_model.interpreter_core_s(size) * max(1.0, job.world_size / (os.cpu_count() or 1))
    )


def head(job: Job) -> str:
    """Return a job's variant with its options, as in the head of a report's column, but without tuning options."""
    tuning = job.workload.cost_model().tuning_options if job.workload.cost_model else ()
    options = [(name, value) for name, value in job.chosen_options().items() if name not in tuning]
    if job.measure.graph:
        options.append(("graph", True))
    return " ".join(
        [
            job.variant,
            *(f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in options),
        ]
    )
