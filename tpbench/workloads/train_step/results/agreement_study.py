"""Study `agreement`: losses and gradient norms of correct rows against one process, and of equal problems by step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from tpbench.tables import Table

PROBLEM = (
    "model", "config_hash", "num_layers", "batch_size", "seq_length", "accumulate", "dp_size", "warmup_steps",
    "batches", "learning_rate", "weight_decay", "max_grad_norm", "seed", "dtype", "autocast",
)  # fmt: skip
"""Columns that identify a problem. Rows that agree in them train on the same tokens with the same updates."""
STEPS = (1, 2, 3, 4, 8, 16)
"""Steps that are shown, besides the last one that rows of a problem share. One process checks the first three."""
_TRAJECTORIES = ("losses", "grad_norms")
"""Columns with one number per step."""

Row: TypeAlias = Mapping[str, Any]


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return the largest errors of each variant, and the largest differences between equal problems by step."""
    correct = [row for row in rows if row["status"] == "ok"]
    problems: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in correct:
        problems[tuple(row.get(name) for name in PROBLEM)].append(row)
    several = [group for group in problems.values() if len(group) > 1]
    made = [_errors(correct)] if correct else []
    return [*made, _differences(several)] if several else made


def picture(rows: Sequence[Row]) -> None:
    """Return None: the study has no picture."""


def _errors(rows: Iterable[Row]) -> Table:
    checks: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        checks[row["oracle"] or "-", row["variant"]].append(row)
    lines = tuple(
        (oracle, variant, str(len(found)), _largest(found, "loss_error"), _largest(found, "grad_error"))
        for (oracle, variant), found in sorted(checks.items())
    )
    columns = ("oracle", "variant", "rows", "largest loss_error", "largest grad_error")
    return Table("largest relative errors of losses and gradient norms", columns, lines)


def _differences(problems: Sequence[Sequence[Row]]) -> Table:
    """Return the table of problems that have two rows or more each."""
    shared = {sorted(len(row["losses"]) for row in group)[-2] for group in problems}
    lines = []
    for step in sorted({*(step for step in STEPS if step < max(shared)), *shared}):
        reached = [[row for row in group if len(row["losses"]) >= step] for group in problems]
        compared = [group for group in reached if len(group) > 1]
        spreads = [_percent(max(_spread(group, name, step) for group in compared)) for name in _TRAJECTORIES]
        lines.append((str(step), str(len(compared)), str(sum(map(len, compared))), *spreads))
    heading = "largest difference between rows of equal problems, relative to the larger value"
    return Table(heading, ("step", "problems", "rows", *_TRAJECTORIES), tuple(lines))


def _spread(group: Iterable[Row], name: str, step: int) -> float:
    """Return the difference of the largest and the smallest value at a step, divided by the largest."""
    values = [float(row[name][step - 1]) for row in group]
    return (max(values) - min(values)) / max(max(values), 1e-12)


def _largest(rows: Iterable[Row], name: str) -> str:
    errors = [float(row[name]) for row in rows if row[name] is not None]
    return _percent(max(errors)) if errors else "-"


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%"
