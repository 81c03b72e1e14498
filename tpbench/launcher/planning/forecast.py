"""`dry_run=true`: the plan of a sweep as text, with the time that its cells are expected to need, and those that run
out of memory."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from tpbench.job import Job
from tpbench.launcher.planning.plan import Cell, PlanningTarget, is_long_on_cpu, notes
from tpbench.launcher.planning.resume import ResumeDecision
from tpbench.measure import machine
from tpbench.predict.cells import cost_models, measured
from tpbench.predict.memory import RESERVE_GIB, this_gpu
from tpbench.predict.model import VariantModel, models, predicted_oom
from tpbench.results.read import chosen_options, load
from tpbench.settings import JobError, spelled
from tpbench.tables import aligned_lines
from tpbench.workloads import workloads

REFERENCE_DIR = "outputs/reference"
"""Folder of the reference rows, which add to the rows in the cells' own output folders."""

START_S = {"cuda": 25.0, "cpu": 10.0}
"""By device, the seconds to start the processes of a job and import torch, if no row says better."""


class Forecast:
    """Expected time and memory of jobs."""

    def __init__(
        self, rows: pd.DataFrame | None, gpu_memory_gib: float | None = None, cpu_memory_gib: float | None = None
    ) -> None:
        """Learn from measured rows.

        Args:
            rows: rows as `tpbench.load` returns them, or None if there are none.
            gpu_memory_gib: memory of one GPU of this machine.
            cpu_memory_gib: main memory that the ranks of a job on the CPU may share. Without a memory only jobs with
                memory_limit_gib can be predicted to run out of it.
        """
        self.gpu_memory_gib, self.cpu_memory_gib = gpu_memory_gib, cpu_memory_gib
        self.wall_s: dict[str, float] = {}
        self.models: dict[str, Mapping[str, VariantModel]] = {}
        """By workload, then by variant."""
        if rows is None or rows.empty:
            return
        last = rows.drop_duplicates("key", keep="last")
        self.wall_s = dict(last[last["status"].isin(["ok", "oom"])].set_index("key")["wall_s"].dropna())
        for name in cost_models():
            with contextlib.suppress(JobError):  # no row was measured on a GPU, so no model can be fitted
                self.models[name] = models(measured(rows, workloads()[name]))

    @classmethod
    def of(cls, cells: Sequence[Cell], on_this_host: bool = True) -> Forecast:
        """Return a forecast from the rows in the cells' output folders and the reference rows.

        `on_this_host`: the cells run on this machine, whose memory limits them.
        """
        folders = [*{cell.job.output_dir for cell in cells}, REFERENCE_DIR]
        existing = [folder for folder in folders if Path(folder).exists()]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows = load(existing) if existing else None
        if not on_this_host:
            return cls(rows)
        gpu = this_gpu()
        return cls(rows, gpu[1] if gpu else None, machine.memory_share_gib(1))

    def seconds(self, job: Job) -> float | None:
        """Return the expected wall time of a job in seconds, or None if it is unknown.

        It is that of the last row of the same job; else, unless the problem fixes the iterations or is large for a CPU,
        the start plus the time budget of the measurement.
        """
        known = self.wall_s.get(job.key)
        if known is None and not job.scheduled and not is_long_on_cpu(job):
            known = START_S[job.device] + 3 * job.measure.time_budget_s
        return known and min(known, job.timeout_s)

    def oom_reason(self, job: Job) -> str | None:
        """Return why a job is predicted to run out of memory, or None if it is not."""
        if job.device == "cuda":
            free_gib = self.gpu_memory_gib and self.gpu_memory_gib - RESERVE_GIB
        else:
            free_gib = self.cpu_memory_gib and self.cpu_memory_gib / job.world_size
        free_gib = job.memory_limit_gib or free_gib
        if not free_gib:
            return None
        least_gib = job.workload.least_gib(job)
        if least_gib and least_gib > free_gib:
            needed = job.workload.expected_memory(job) or f"a rank needs at least {least_gib:.3g} GiB"
            return f"predicted to run out of memory: {needed}, {free_gib:.3g} GiB free"
        if not job.workload.cost_model:
            return None
        cost_model = job.workload.cost_model()
        size = cost_model.size_of(job.flat())
        options = chosen_options(job.flat(), job.workload)
        named = [f"{name}={spelled(value)}" for name, value in options if name not in cost_model.tuning_options]
        label = " ".join([job.variant, *named])
        return predicted_oom(self.models.get(job.workload.name, {}), label, size, free_gib) if size else None


def dry_run_text(
    cells: Sequence[Cell], decisions: Mapping[int, ResumeDecision], target: PlanningTarget, forecast: Forecast
) -> str:
    """Return the plan as text: one line per cell, then the totals.

    Args:
        cells: the cells of the sweep.
        decisions: those of resume=true, by the cell's index; empty if all cells run anew.
        target: the machine that the cells are planned for.
        forecast: expected times and memory.
    """
    grid = []
    expected: list[float | None] = []
    for cell in cells:
        decision, ranks = decisions.get(cell.index), cell.job.world_size
        device = f"{ranks} GPU{'s' * (ranks > 1)}" if cell.job.device == "cuda" else f"cpu, {ranks} ranks"
        if (nodes := target.nodes_of(cell.job)) > 1:
            device = f"{device} on {nodes} nodes"
        time, remarks = "-", [decision.reason] if decision else []
        if cell.skip_reason:
            remarks = [f"skipped: {cell.skip_reason}"]
        elif decision is None or decision.row is None:
            expected.append(forecast.seconds(cell.job))
            time = "unknown" if expected[-1] is None else _minutes(expected[-1])
            remarks += filter(None, [forecast.oom_reason(cell.job)])
        grid.append([str(cell.index), str(cell), device, time, "; ".join(remarks)])
    known, unknown = sum(filter(None, expected)), expected.count(None)
    totals = [f"{len(cells)} cell{'s' * (len(cells) != 1)}", f"{len(expected)} to run"]
    totals += [f"about {_minutes(known)} one after the other"] * bool(known)
    totals += [f"{unknown} of unknown length"] * bool(unknown)
    lines = aligned_lines(["cell", "job", "device", "expected", ""], grid)
    return "\n".join([*lines, "", *notes(cells), f"{', '.join(totals)}. Nothing was run.", ""])


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min"
