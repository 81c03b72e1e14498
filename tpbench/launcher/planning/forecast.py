"""`dry_run=true`: the plan of a sweep as text, with the time that its cells are expected to need."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from tpbench.job import Job
from tpbench.launcher.planning.plan import Cell, PlanningTarget, is_long_on_cpu, notes
from tpbench.launcher.planning.resume import ResumeDecision
from tpbench.measure.machine import L2_FLUSH_BYTES
from tpbench.predict.target import RESERVE_GIB
from tpbench.results.read import load
from tpbench.suggestions import memory_text
from tpbench.tables import aligned_lines

START_S = {"cuda": 25.0, "cpu": 10.0}
"""By device, the seconds to start the processes of a job and import torch, if no row says better."""


def measured_seconds(cells: Sequence[Cell]) -> dict[str, tuple[float, float]]:
    """Return by the keys of jobs the seconds of each and of its start, from the cells' folders and reference rows."""
    folders = {*(cell.job.output_dir for cell in cells), "outputs/reference"}
    if not (existing := [folder for folder in folders if Path(folder).exists()]):
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = load(existing)
    last = rows[rows["status"].isin(["ok", "oom"])].drop_duplicates("key", keep="last").set_index("key")
    last = last[last["wall_s"].notna()]
    start_s = last["start_s"].astype(float).fillna(0.0)
    work_s = (last["wall_s"] - start_s) / last["interleaved_cells"].astype(float).fillna(1.0)
    return dict(zip(last.index, zip(work_s, start_s, strict=True), strict=True))


def expected_seconds(job: Job, measured: Mapping[str, tuple[float, float]], *, starts: bool = True) -> float | None:
    """Return the expected wall time of a job in seconds, or None. `starts`: it starts processes of its own."""
    if job.key in measured:
        work_s, start_s = measured[job.key]
    elif job.scheduled or is_long_on_cpu(job):
        return None
    else:
        work_s, start_s = 3 * job.measure.time_budget_s, START_S[job.device]
    return min(work_s + start_s * starts, job.timeout_s)


def shortage(job: Job, gpu_gib: float | None, cpu_gib: float | None) -> str | None:
    """Return why a job doesn't fit in the memory of a GPU, or in the main memory that its ranks share, if known."""
    free_gib = (gpu_gib and gpu_gib - RESERVE_GIB) if job.device == "cuda" else cpu_gib and cpu_gib / job.world_size
    if job.memory_limit_gib:
        # The buffer that evicts the caches counts, too.
        free_gib = max(0.0, job.memory_limit_gib - (job.device == "cuda") * L2_FLUSH_BYTES / 2**30)
    least_gib = job.workload.least_gib(job)
    if free_gib is None or not least_gib or least_gib <= free_gib:
        return None
    needed = job.workload.expected_memory(job) or f"a rank needs at least {memory_text(least_gib)}"
    return f"runs out of memory: {needed}, {memory_text(free_gib)} free"


def dry_run_text(
    cells: Sequence[Cell], decisions: Mapping[int, ResumeDecision], target: PlanningTarget, reuse: bool = False
) -> str:
    """Return the plan as text: one line per cell, then the totals. `decisions`: those of resume=true, by index."""
    grid, started, memory, seconds = [], set[int](), target.memory_gib(), measured_seconds(cells)
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
            # With reuse=true jobs of equally many ranks share the processes of the first one.
            starts = not reuse or ranks not in started
            started.add(ranks)
            expected.append(expected_seconds(cell.job, seconds, starts=starts))
            time = "unknown" if expected[-1] is None else f"{expected[-1] / 60:.1f} min"
            remarks += filter(None, [shortage(cell.job, *memory)])
        grid.append([str(cell.index), str(cell), device, time, "; ".join(remarks)])
    total_s, unknown = sum(filter(None, expected)), expected.count(None)
    totals = [f"{len(cells)} cell{'s' * (len(cells) != 1)}", f"{len(expected)} to run"]
    totals += [f"about {total_s / 60:.1f} min one after the other"] * bool(total_s)
    totals += [f"{unknown} of unknown length"] * bool(unknown)
    lines = aligned_lines(["cell", "job", "device", "expected", ""], grid)
    return "\n".join([*lines, "", *notes(cells), f"{', '.join(totals)}. Nothing was run.", ""])
