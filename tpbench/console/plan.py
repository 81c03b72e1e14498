"""`dry_run=true`: the plan of a sweep as text, with the expected time of each cell."""

from __future__ import annotations

from collections.abc import Sequence

from tpbench.launcher.forecast import Forecast
from tpbench.launcher.plan import Cell, ignored_notes


def dry_run_text(cells: Sequence[Cell]) -> str:
    """Return the plan with expectations for this machine, from stored rows."""
    return plan_text(cells, Forecast.of(cells))


def plan_text(cells: Sequence[Cell], forecast: Forecast) -> str:
    """Return the plan as text: one line per cell, then the totals."""
    grid = [["cell", "job", "device", "expected", ""]]
    total_s, unknown = 0.0, 0
    for cell in cells:
        remark, seconds = _expected(cell, forecast)
        total_s += seconds or 0.0
        unknown += seconds is None
        ranks = cell.job.world_size
        device = _gpus(ranks) if cell.job.device == "cuda" else f"cpu, {ranks} ranks"
        time = "unknown" if seconds is None else f"{seconds / 60:.1f} min" if seconds else "-"
        grid.append([str(cell.index), str(cell), device, time, remark])
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    lines = ["  ".join(item.ljust(width) for item, width in zip(line, widths, strict=True)).rstrip() for line in grid]
    return "\n".join([*lines, "", *ignored_notes(cells), f"{_totals(cells, total_s, unknown)}. Nothing was run.", ""])


def _expected(cell: Cell, forecast: Forecast) -> tuple[str, float | None]:
    """Return a remark on a cell and its seconds, which are None if they are unknown."""
    if cell.skip_reason:
        return f"skipped: {cell.skip_reason}", 0.0
    if cell.same_as is not None:
        return f"the same job as cell {cell.same_as}", 0.0
    return forecast.oom_reason(cell.job) or "", forecast.seconds(cell.job)


def _totals(cells: Sequence[Cell], total_s: float, unknown: int) -> str:
    running = sum(cell.skip_reason is None and cell.same_as is None for cell in cells)
    most = max((cell.job.world_size for cell in cells if cell.job.device == "cuda" and not cell.skip_reason), default=0)
    gpus = f", at most {_gpus(most)} for one" if most else ""
    duration = f"about {total_s / 60:.1f} minutes one after the other"
    if unknown:
        duration = "of unknown length" if unknown == running else f"{duration}, and {unknown} of unknown length"
    return f"{len(cells)} cell{'s' * (len(cells) != 1)}, {running} to run{gpus}, {duration}"


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' * (count > 1)}"
