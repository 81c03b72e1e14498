"""`dry_run=true`: the plan of a sweep as text, with the expected time of each cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tpbench.launcher.planning.forecast import Forecast
from tpbench.launcher.planning.plan import Cell, ignored_notes
from tpbench.launcher.planning.resume import ResumeDecision


def dry_run_text(cells: Sequence[Cell], decisions: Mapping[int, ResumeDecision]) -> str:
    """Return the plan with expectations for this machine, from stored rows."""
    return plan_text(cells, Forecast.of(cells), decisions)


def plan_text(cells: Sequence[Cell], forecast: Forecast, decisions: Mapping[int, ResumeDecision]) -> str:
    """Return the plan as text: one line per cell, then the totals.

    `decisions`: those of resume=true, by the cell's index; empty if all cells run anew.
    """
    grid = [["cell", "job", "device", "expected", ""]]
    expected = []
    for cell in cells:
        no_run = _reason_not_to_run(cell, decisions)
        seconds = None if no_run else forecast.seconds(cell.job)
        ranks = cell.job.world_size
        device = _gpus(ranks) if cell.job.device == "cuda" else f"cpu, {ranks} ranks"
        time = "-" if no_run else "unknown" if seconds is None else f"{seconds / 60:.1f} min"
        remarks = [no_run] if no_run else [_reason_to_run(cell, decisions), forecast.oom_reason(cell.job)]
        grid.append([str(cell.index), str(cell), device, time, "; ".join(filter(None, remarks))])
        if not no_run:
            expected.append((cell, seconds))
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    lines = ["  ".join(item.ljust(width) for item, width in zip(line, widths, strict=True)).rstrip() for line in grid]
    return "\n".join([*lines, "", *ignored_notes(cells), f"{_totals(len(cells), expected)}. Nothing was run.", ""])


def _reason_not_to_run(cell: Cell, decisions: Mapping[int, ResumeDecision]) -> str | None:
    if cell.skip_reason:
        return f"skipped: {cell.skip_reason}"
    if cell.same_as is not None:
        return f"the same job as cell {cell.same_as}"
    decision = decisions.get(cell.index)
    return decision.reason if decision and decision.row is not None else None


def _reason_to_run(cell: Cell, decisions: Mapping[int, ResumeDecision]) -> str | None:
    """Return why resume=true runs a cell."""
    return decisions[cell.index].reason if cell.index in decisions else None


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
