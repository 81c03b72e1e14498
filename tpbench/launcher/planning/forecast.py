"""`dry_run=true`: the plan of a sweep as text, with the time and memory that its cells are expected to need."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from tpbench.job import Job
from tpbench.launcher import devices
from tpbench.launcher.planning.plan import Cell, ignored_notes
from tpbench.launcher.planning.resume import ResumeDecision
from tpbench.predict.cells import measured, predictable
from tpbench.predict.memory import RESERVE_GIB
from tpbench.predict.model import VariantModel, models, predicted_oom
from tpbench.results.read import load
from tpbench.settings import JobError, spelled
from tpbench.tables import aligned_lines

REFERENCE_DIR = "outputs/reference"
"""Folder of the reference rows, which add to the rows in the cells' own output folders."""

START_S = 25.0
"""Seconds to start the processes and import torch, if no row says better."""


class Forecast:
    """Expected time and memory of jobs."""

    def __init__(self, rows: pd.DataFrame | None, gpu_memory_gib: float | None = None) -> None:
        """Learn from measured rows.

        Args:
            rows: rows as `tpbench.load` returns them, or None if there are none.
            gpu_memory_gib: memory of one GPU of this machine. Without it only jobs with memory_limit_gib can be
                predicted to run out of memory.
        """
        self.gpu_memory_gib = gpu_memory_gib
        self.wall_s: dict[str, float] = {}
        self.typical_s: dict[tuple[str, int, str], float] = {}
        """By workload, world size and device."""
        self.models: dict[str, Mapping[str, VariantModel]] = {}
        """By workload, then by variant."""
        if rows is None or rows.empty:
            return
        done = rows[rows["wall_s"].notna() & (rows["status"] == "ok")]
        self.wall_s = dict(done.groupby("key")["wall_s"].last())
        self.typical_s = dict(done.groupby(["workload", "world_size", "device"])["wall_s"].median())
        for name, workload in predictable().items():
            with contextlib.suppress(JobError):  # no row was measured on a GPU, so no model can be fitted
                self.models[name] = models(measured(rows, workload))

    @classmethod
    def of(cls, cells: Sequence[Cell]) -> Forecast:
        """Return a forecast for this machine, from the rows in the cells' output folders and the reference rows."""
        folders = [*{cell.job.output_dir for cell in cells}, REFERENCE_DIR]
        existing = [folder for folder in folders if Path(folder).exists()]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return cls(load(existing) if existing else None, devices.smallest_memory_gib())

    def seconds(self, job: Job) -> float | None:
        """Return the expected wall time of a job in seconds, or None if it is unknown.

        The sources are, in this order: the last row of the same job, the median of similar jobs, and the time budget
        of the measurement plus the start. Only the first holds for a workload whose problem fixes the iterations.
        """
        known = self.wall_s.get(job.key)
        if job.scheduled:
            return known
        similar = self.typical_s.get((job.workload.name, job.world_size, job.device))
        return float(known or similar or START_S + 2 * job.measure.time_budget_s)

    def oom_reason(self, job: Job) -> str | None:
        """Return why a job is predicted to run out of memory, or None if it is not."""
        free_gib = job.memory_limit_gib or (self.gpu_memory_gib and self.gpu_memory_gib - RESERVE_GIB)
        if job.device != "cuda" or not free_gib or not job.workload.cost_model:
            return None
        cost_model = job.workload.cost_model()
        size = cost_model.size_of(job.flat())
        label = variant_label(job, cost_model.tuning_options)
        return predicted_oom(self.models.get(job.workload.name, {}), label, size, free_gib) if size else None


def skip_predicted_oom(cells: Sequence[Cell], forecast: Forecast) -> list[Cell]:
    """Return the cells with a skip reason added to each cell that is predicted to run out of memory."""
    labelled = []
    for cell in cells:
        reason = None if cell.skip_reason else forecast.oom_reason(cell.job)
        labelled.append(replace(cell, skip_reason=f"{reason} (skip_predicted_oom=true)") if reason else cell)
    return labelled


def variant_label(job: Job, tuning_options: Sequence[str] = ()) -> str:
    """Return a job's variant with its options, as a report's column names it.

    Tuning options, such as the block cap, are left out because they do not change the memory that a job needs.
    """
    options = {name: value for name, value in job.chosen_options().items() if name not in tuning_options}
    if job.measure.graph:
        options["graph"] = True
    return " ".join([job.variant, *(f"{name}={spelled(value)}" for name, value in options.items())])


def dry_run_text(
    cells: Sequence[Cell], decisions: Mapping[int, ResumeDecision], forecast: Forecast | None = None
) -> str:
    """Return the plan as text: one line per cell, then the totals.

    Args:
        cells: the cells of the sweep.
        decisions: those of resume=true, by the cell's index; empty if all cells run anew.
        forecast: expected times and memory. None: as stored rows say for this machine.
    """
    forecast = forecast or Forecast.of(cells)
    grid = []
    expected = []
    for cell in cells:
        decision = decisions.get(cell.index)
        if cell.skip_reason:
            no_run: str | None = f"skipped: {cell.skip_reason}"
        elif cell.same_as is not None:
            no_run = f"the same job as cell {cell.same_as}"
        else:
            no_run = decision.reason if decision and decision.row is not None else None
        ranks = cell.job.world_size
        device = _gpus(ranks) if cell.job.device == "cuda" else f"cpu, {ranks} ranks"
        if no_run:
            time, remark = "-", no_run
        else:
            seconds = forecast.seconds(cell.job)
            expected.append((cell, seconds))
            time = "unknown" if seconds is None else f"{seconds / 60:.1f} min"
            remark = "; ".join(filter(None, [decision.reason if decision else None, forecast.oom_reason(cell.job)]))
        grid.append([str(cell.index), str(cell), device, time, remark])
    lines = aligned_lines(["cell", "job", "device", "expected", ""], grid)
    return "\n".join([*lines, "", *ignored_notes(cells), f"{_totals(len(cells), expected)}. Nothing was run.", ""])


def _totals(cells: int, expected: Sequence[tuple[Cell, float | None]]) -> str:
    """Return the totals of that many cells. `expected`: the cells to run with their seconds, None if unknown."""
    total = f"{cells} cell{'s' * (cells != 1)}, {len(expected)} to run"
    if not expected:
        return total
    most = max((cell.job.world_size for cell, _ in expected if cell.job.device == "cuda"), default=0)
    gpus = f", at most {_gpus(most)} for one" if most else ""
    unknown = sum(seconds is None for _, seconds in expected)
    duration = f"about {sum(seconds or 0.0 for _, seconds in expected) / 60:.1f} minutes one after the other"
    if unknown:
        duration = "of unknown length" if unknown == len(expected) else f"{duration}, and {unknown} of unknown length"
    return f"{total}{gpus}, {duration}"


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' * (count > 1)}"
