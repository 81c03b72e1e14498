"""`dry_run=true`: the plan of a sweep as text, with the time and memory that its cells are expected to need."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from tpbench.job import Job
from tpbench.launcher.planning.plan import Cell, PlanningTarget, ThisHost, long_cpu_s, notes
from tpbench.launcher.planning.resume import ResumeDecision
from tpbench.measure import machine
from tpbench.predict.cells import cost_models, measured
from tpbench.predict.memory import RESERVE_GIB, SAME_SHARE, known_gpu, this_gpu
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
        self.ran_out_within: dict[str, float] = {}
        """By the key of a job whose last row is `oom`: the memory of a rank, in GiB."""
        self.models: dict[str, Mapping[str, VariantModel]] = {}
        """By workload, then by variant."""
        if rows is None or rows.empty:
            return
        last = rows.drop_duplicates("key", keep="last")
        self.wall_s = dict(last[last["status"].isin(["ok", "oom"])].set_index("key")["wall_s"].dropna())
        self.ran_out_within = {row["key"]: _memory_of(row) for _, row in last[last["status"] == "oom"].iterrows()}
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

        It is that of the last row of the same job; else, unless the problem fixes the iterations, the start plus the
        time budget of the measurement, or about the time of a large problem on a CPU.
        """
        known = self.wall_s.get(job.key)
        if known or job.scheduled:
            return known
        return START_S[job.device] + (long_cpu_s(job) or 3 * job.measure.time_budget_s)

    def outcome(self, job: Job) -> tuple[float | None, list[str]]:
        """Return the expected wall time of a job in seconds, and remarks on its end.

        The time ends at the timeout, or as soon as memory runs out. The remarks say so, and how much memory the job
        needs if nothing tells what is free.
        """
        seconds, oom = self.seconds(job), self.oom_reason(job)
        remarks = [oom] if oom else []
        if oom and job.key not in self.wall_s:
            seconds = START_S[job.device]
        elif not oom and seconds and seconds > job.timeout_s:
            remarks = [f"expected to end as timeout: it needs {_minutes(seconds)}, timeout_s={job.timeout_s:g}"]
        if not self.free_gib(job) and (needed := job.workload.expected_memory(job)):
            remarks.append(needed)
        return seconds and min(seconds, job.timeout_s), remarks

    def free_gib(self, job: Job) -> float | None:
        """Return the memory that each rank of the job may use, or None if it is unknown."""
        if job.memory_limit_gib:
            return job.memory_limit_gib
        if job.device == "cuda":
            return self.gpu_memory_gib and self.gpu_memory_gib - RESERVE_GIB
        return self.cpu_memory_gib and self.cpu_memory_gib / job.world_size

    def oom_reason(self, job: Job) -> str | None:
        """Return why a job is predicted to run out of memory, or None if it is not."""
        free_gib = self.free_gib(job)
        if not free_gib:
            return None
        limit = self.ran_out_within.get(job.key)
        if limit and free_gib <= (1 + SAME_SHARE) * limit:
            return f"expected to run out of memory: its last run did, within {limit:.3g} GiB"
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


def _memory_of(row: pd.Series) -> float:
    """Return the memory in GiB that each rank had in a row that ran out of it, or 0 if nothing tells."""
    known = known_gpu(str(row["gpu_name"])) if row["device"] == "cuda" else (row["memory_gib"] / row["world_size"],)
    return float(row["memory_limit_gib"] if pd.notna(row["memory_limit_gib"]) else known[0] if known else 0.0)


def skip_predicted_oom(cells: Sequence[Cell], forecast: Forecast) -> list[Cell]:
    """Return the cells with a skip reason added to each cell that is predicted to run out of memory."""
    labelled = []
    for cell in cells:
        reason = None if cell.skip_reason else forecast.oom_reason(cell.job)
        labelled.append(replace(cell, skip_reason=f"{reason} (skip_predicted_oom=true)") if reason else cell)
    return labelled


def dry_run_text(
    cells: Sequence[Cell],
    decisions: Mapping[int, ResumeDecision],
    target: PlanningTarget,
    scripts: Callable[[Sequence[Cell]], list[str]] = lambda cells: [],
    forecast: Forecast | None = None,
) -> str:
    """Return the plan as text: one line per cell, then the scripts that a cluster gets, and the totals.

    Args:
        cells: the cells of the sweep.
        decisions: those of resume=true, by the cell's index; empty if all cells run anew.
        target: the machine that the cells are planned for.
        scripts: returns those of Slurm for the cells that run.
        forecast: expected times and memory. None: as stored rows say for the target.
    """
    forecast = forecast or Forecast.of(cells, isinstance(target, ThisHost))
    grid, expected, to_run = [], [], []
    for cell in cells:
        decision, ranks = decisions.get(cell.index), cell.job.world_size
        device = f"{ranks} GPU{'s' * (ranks > 1)}" if cell.job.device == "cuda" else f"cpu, {ranks} ranks"
        if (nodes := target.nodes_of(cell.job)) > 1:
            device = f"{device} on {nodes} nodes"
        time, remarks = "-", [decision.reason] if decision else []
        if cell.skip_reason:
            remarks = [f"skipped: {cell.skip_reason}"]
        elif decision is None or decision.row is None:
            to_run.append(cell)
            seconds, more = forecast.outcome(cell.job)
            expected.append(seconds)
            time = "unknown" if seconds is None else _minutes(seconds)
            remarks += more
        grid.append([str(cell.index), str(cell), device, time, "; ".join(remarks)])
    lines = aligned_lines(["cell", "job", "device", "expected", ""], grid)
    totals = f"{_totals(len(cells), expected)}. Nothing was run."
    return "\n".join([*lines, *scripts(to_run), "", *notes(cells), totals, ""])


def _totals(cells: int, expected: Sequence[float | None]) -> str:
    """Return the totals of that many cells. `expected`: the seconds of those to run, None if unknown."""
    known, unknown = sum(filter(None, expected)), expected.count(None)
    parts = [f"{cells} cell{'s' * (cells != 1)}", f"{len(expected)} to run"]
    parts += [f"about {_minutes(known)} one after the other"] * bool(known)
    parts += [f"{unknown} of unknown length"] * bool(unknown)
    return ", ".join(parts)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min"
