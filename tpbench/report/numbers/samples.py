"""Samples of measured cells: outliers, and speed-ups with intervals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tpbench.report.grids.grid import RecordGrid
from tpbench.report.grids.records import Record, is_measurement
from tpbench.report.numbers.clocks import Clock
from tpbench.report.numbers.interleaved import interleaved_ratio
from tpbench.report.numbers.ratio import Array, Ratio, clean, ratio

OUTLIER = "an outlier is more than 1.5 interquartile ranges outside the quartiles"


@dataclass(frozen=True)
class SampledCell:
    """A correct cell with measured times, and its place in a grid."""

    problem: str
    """Keys of its row, safe to print."""
    column: str
    column_index: int
    record: Record


def measured_cells(grid: RecordGrid) -> Iterator[SampledCell]:
    """Iterate over the cells of a grid that are correct and measurements."""
    for cell in grid.cells():
        if is_measurement(cell.record):
            problem = grid.problem_text(cell.key, grid.distinguishing_keys(grid.varying))
            yield SampledCell(problem, cell.column, cell.column_index, cell.record)


def outliers(samples: Array) -> Array:
    """Return the samples that are outliers as defined by `OUTLIER`."""
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
    fastest: SampledCell
    other: SampledCell
    ratio: Ratio
    interleaved: bool
    """True if the two were measured interleaved. Then the ratio is that of their rounds."""


def speedups(grid: RecordGrid, clock: Clock) -> list[Speedup]:
    """Compare the fastest column of each problem with each other column, by the samples of `clock`."""
    samples = clock.samples_column
    compared = []
    by_problem: dict[str, list[SampledCell]] = {}
    for cell in measured_cells(grid):
        if len(clean(cell.record[samples])):
            by_problem.setdefault(cell.problem, []).append(cell)
    for problem, cells in by_problem.items():
        fastest = min(cells, key=lambda cell: float(np.median(clean(cell.record[samples]))))
        for cell in cells:
            if cell is fastest:
                continue
            by_rounds = interleaved_ratio(cell.record, fastest.record, samples)
            if measured := by_rounds or ratio(cell.record[samples], fastest.record[samples]):
                compared.append(Speedup(problem, fastest, cell, measured, by_rounds is not None))
    return compared
