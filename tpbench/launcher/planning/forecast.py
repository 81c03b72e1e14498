"""`dry_run=true`: the plan of a sweep as text, with the time that its cells are expected to need."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from tpbench.job import Job
from tpbench.launcher.planning.plan import Cell, PlanningTarget, is_long_on_cpu, notes
from tpbench.launcher.planning.resume import ResumeDecision
from tpbench.predict.cells import measured
from tpbench.predict.model import VariantModel
from tpbench.predict.target import RESERVE_GIB
from tpbench.report.analysis.grid import column_name
from tpbench.results.read import chosen_options, load
from tpbench.settings import JobError, spelled
from tpbench.suggestions import memory_text
from tpbench.tables import aligned_lines
from tpbench.workloads.entropy_loss import WORKLOAD as ENTROPY_LOSS
from tpbench.workloads.entropy_loss.cost_model import size_of

START_S = {"cuda": 25.0, "cpu": 10.0}
"""By device, the seconds to start the processes of a job and import torch, if no row says better."""


def known_rows(cells: Sequence[Cell]) -> pd.DataFrame:
    """Return rows of the cells' output folders and the reference rows."""
    folders = {*(cell.job.output_dir for cell in cells), "outputs/reference"}
    existing = [folder for folder in folders if Path(folder).exists()]
    if not existing:
        return pd.DataFrame()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load(existing)


def measured_seconds(rows: pd.DataFrame) -> dict[str, tuple[float, float]]:
    """Return the seconds that jobs took by themselves, by their keys, and those of the start of their processes.

    Cells that were interleaved share the time of their group.
    """
    if rows.empty:
        return {}
    last = rows[rows["status"].isin(["ok", "oom"])].drop_duplicates("key", keep="last").set_index("key")
    last = last[last["wall_s"].notna()]
    start_s = last["start_s"].astype(float).fillna(0.0)
    work_s = (last["wall_s"] - start_s) / last["interleaved_cells"].astype(float).fillna(1.0)
    return dict(zip(last.index, zip(work_s, start_s, strict=True), strict=True))


def expected_seconds(job: Job, measured: Mapping[str, tuple[float, float]], *, starts: bool = True) -> float | None:
    """Return the expected wall time of a job in seconds, or None if it is unknown.

    It is that of its last row; else, unless the problem fixes the iterations or is large for a CPU, the start plus the
    time budget of the measurement. A job that starts no processes takes only the rest.
    """
    if job.key in measured:
        work_s, start_s = measured[job.key]
    elif job.scheduled or is_long_on_cpu(job):
        return None
    else:
        work_s, start_s = 3 * job.measure.time_budget_s, START_S[job.device]
    return min(work_s + start_s * starts, job.timeout_s)


def measured_needs(cells: Sequence[Cell], rows: pd.DataFrame) -> dict[int, float]:
    """Return by a cell's index the GiB that a rank needs, inputs included, where rows of its variant tell the peak."""
    wanted = {
        cell.index: size
        for cell in cells
        if cell.job.workload is ENTROPY_LOSS and cell.job.device == "cuda" and (size := size_of(cell.job.flat()))
    }
    if not wanted or rows.empty:
        return {}
    try:
        known = measured(rows).cells
    except JobError:  # no row of a GPU
        return {}
    needs: dict[int, float] = {}
    for cell in cells:
        row = {name: spelled(value) if name == "block_cap" else value for name, value in cell.job.flat().items()}
        label = column_name((row["variant"], *chosen_options(row, ENTROPY_LOSS)))
        own = [one for one in known if one.label == label]
        if cell.index in wanted and own:
            peak_gib = VariantModel(label, own).value("peak_gib", wanted[cell.index])
            needs |= {cell.index: wanted[cell.index].inputs_gib + peak_gib} if peak_gib is not None else {}
    return needs


def shortage(job: Job, gpu_gib: float | None, cpu_gib: float | None, needed_gib: float = 0.0) -> str | None:
    """Return why a job doesn't fit in the memory of the machine, or None if it does as far as is known.

    `gpu_gib`: memory of one GPU. `cpu_gib`: main memory that all ranks share. None: unknown. `needed_gib`: that of a
    rank, as rows tell it. Without it only the inputs of a job, or its model, count.
    """
    free_gib = (gpu_gib and gpu_gib - RESERVE_GIB) if job.device == "cuda" else cpu_gib and cpu_gib / job.world_size
    free_gib, least_gib = job.memory_limit_gib or free_gib, max(needed_gib, job.workload.least_gib(job) or 0.0)
    if not (free_gib and least_gib and least_gib > free_gib):
        return None
    needed = job.workload.expected_memory(job) or f"a rank needs at least {memory_text(least_gib)}"
    return f"runs out of memory: {needed}, {memory_text(free_gib)} free"


def dry_run_text(
    cells: Sequence[Cell],
    decisions: Mapping[int, ResumeDecision],
    target: PlanningTarget,
    rows: pd.DataFrame,
    reuse: bool = False,
) -> str:
    """Return the plan as text: one line per cell, then the totals.

    `decisions`: those of resume=true, by the cell's index. `rows`: those of earlier jobs. `reuse`: jobs of equally many
    ranks share their processes, so only the first of them starts some.
    """
    grid, started = [], set[int]()
    seconds, needs = measured_seconds(rows), measured_needs(cells, rows)
    expected: list[float | None] = []
    memory = target.memory_gib()
    for cell in cells:
        decision, ranks = decisions.get(cell.index), cell.job.world_size
        device = f"{ranks} GPU{'s' * (ranks > 1)}" if cell.job.device == "cuda" else f"cpu, {ranks} ranks"
        if (nodes := target.nodes_of(cell.job)) > 1:
            device = f"{device} on {nodes} nodes"
        time, remarks = "-", [decision.reason] if decision else []
        if cell.skip_reason:
            remarks = [f"skipped: {cell.skip_reason}"]
        elif decision is None or decision.row is None:
            starts = not reuse or ranks not in started or not cell.job.workload.reusable_process
            started.add(ranks)
            expected.append(expected_seconds(cell.job, seconds, starts=starts))
            time = "unknown" if expected[-1] is None else _minutes(expected[-1])
            remarks += filter(None, [shortage(cell.job, *memory, needs.get(cell.index, 0.0))])
        grid.append([str(cell.index), str(cell), device, time, "; ".join(remarks)])
    total_s, unknown = sum(filter(None, expected)), expected.count(None)
    totals = [f"{len(cells)} cell{'s' * (len(cells) != 1)}", f"{len(expected)} to run"]
    totals += [f"about {_minutes(total_s)} one after the other"] * bool(total_s)
    totals += [f"{unknown} of unknown length"] * bool(unknown)
    lines = aligned_lines(["cell", "job", "device", "expected", ""], grid)
    return "\n".join([*lines, "", *notes(cells), f"{', '.join(totals)}. Nothing was run.", ""])


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min"
