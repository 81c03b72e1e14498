"""What the samples of a cell say beyond their median."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tpbench.report.layout import Section
from tpbench.report.pivot import mark
from tpbench.report.ratio import Array, Ratio, clean, ratio
from tpbench.report.records import Record, label, say
from tpbench.report.turns import in_turns

CLOCKS = {"samples_ms": "wall", "device_samples_ms": "device"}
OUTLIER = "an outlier is more than 1.5 interquartile ranges outside the quartiles"


@dataclass(frozen=True)
class Measured:
    """A cell that was measured, and where it stands."""

    problem: str
    """What the row is, fit to print."""
    head: str
    column: int
    record: Record


def measured(section: Section) -> Iterator[Measured]:
    """The cells of a section that are right, and measurements."""
    for row in section.rows:
        problem = problem_of(section, row.key, section.telling)
        for column, (head, record) in enumerate(zip(section.heads, row.records, strict=True)):
            if record and record["status"] == "ok" and not mark(record):
                yield Measured(problem, head, column, record)


def problem_of(section: Section, key: Sequence[object], places: Sequence[int] | None = None) -> str:
    """A row's key as words, without what follows from the rest; or only what is at these places of it."""
    return " ".join(f"{label(section.names[at])}={say(key[at])}" for at in places or section.own)


def outliers(samples: Array) -> Array:
    """The samples that lie far out, as `OUTLIER` says."""
    if len(samples) < 4:
        return samples[:0]
    low, high = np.percentile(samples, [25, 75])
    reach = 1.5 * (high - low)
    far: Array = samples[(samples < low - reach) | (samples > high + reach)]
    return far


@dataclass(frozen=True)
class Speedup:
    """How many times faster the fastest column of a row is than another."""

    problem: str
    fastest: Measured
    other: Measured
    ratio: Ratio
    in_turns: bool
    """They were measured in turns, and the ratio is their rounds'."""


def speedups(section: Section, clock: str) -> list[Speedup]:
    """For each problem, the fastest column against each other one, by the samples of `clock`."""
    made = []
    by_problem: dict[str, list[Measured]] = {}
    for cell in measured(section):
        if len(clean(cell.record[clock])):
            by_problem.setdefault(cell.problem, []).append(cell)
    for problem, cells in by_problem.items():
        fastest = min(cells, key=lambda cell: float(np.median(clean(cell.record[clock]))))
        for cell in cells:
            if cell is fastest:
                continue
            by_rounds = in_turns(cell.record, fastest.record, clock)
            if found := by_rounds or ratio(cell.record[clock], fastest.record[clock]):
                made.append(Speedup(problem, fastest, cell, found, by_rounds is not None))
    return made
