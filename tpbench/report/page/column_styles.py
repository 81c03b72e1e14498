"""Colours and markers of variants. Each variant has one of both on the whole page; no two variants share a pair."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tpbench.report.analysis.grid import RecordGrid
from tpbench.report.analysis.records import value_text
from tpbench.report.plots.style import LIGHT
from tpbench.workloads import workloads

MARKERS = (
    "m-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0z",  # disc
    "m-2.7-2.7h5.4v5.4h-5.4z",  # square
    "m0-3.5l3.2 6h-6.4z",  # triangle
    "m0-3.7l3.7 3.7-3.7 3.7-3.7-3.7z",  # diamond
    "m0 3.5l3.2-6h-6.4z",  # triangle, tip down
    "m-1.2-3.4h2.4v2.2h2.2v2.4h-2.2v2.2h-2.4v-2.2h-2.2v-2.4h2.2z",  # cross
    "m-3.5 0l6-3.2v6.4z",  # triangle, tip to the left
    "m3.5 0l-6-3.2v6.4z",  # triangle, tip to the right
    "m0-3.6l3.1 1.8v3.6l-3.1 1.8-3.1-1.8v-3.6z",  # hexagon
)
"""Outlines of markers as relative SVG paths, about 7 units wide."""

DASHES = ("1.5 2.5", "6 3", "9 3 1.5 3", "3 3", "12 3", "6 2 1.5 2 1.5 2")
"""Patterns of the lines of a variant's options."""


@dataclass(frozen=True)
class Look:
    """Colour, marker and line of a column."""

    colour: int
    """Index of the CSS variable `--s0`, `--s1`, ..."""
    marker: int
    """Index in `MARKERS`."""
    options: int = 0
    """0 for a variant without options: a filled marker and a solid line. Else hollow, with dashes of this number."""

    @property
    def stroke(self) -> str:
        """The CSS of its line."""
        return f"stroke:var(--s{self.colour})"

    @property
    def fill(self) -> str:
        """The CSS of the inside of its marker."""
        return "fill:var(--ground)" if self.options else f"fill:var(--s{self.colour})"

    @property
    def dashes(self) -> str:
        """The attribute of its line's dashes, or nothing."""
        pattern = DASHES[(self.options - 1) % len(DASHES)]
        return f' stroke-dasharray="{pattern}"' if self.options else ""


Looks = dict[tuple[str, str], Look]
"""The look of each column of a page, by workload and name of the column."""


def assign_looks(grids: Iterable[RecordGrid]) -> Looks:
    """Return the look of every column. Options of a variant share its colour and marker."""
    grids = list(grids)
    variants: dict[str, dict[str, None]] = {
        name: dict.fromkeys(workload.variants) for name, workload in workloads().items()
    }
    columns: dict[tuple[str, str], dict[str, None]] = {}
    for grid in grids:
        for cell in grid.cells():
            variant = value_text(cell.record["variant"])
            variants.setdefault(grid.workload, {})[variant] = None
            columns.setdefault((grid.workload, variant), {})[cell.column] = None
    looks: Looks = {}
    used: set[tuple[int, int]] = set()
    for at, (workload, names) in enumerate(variants.items()):
        for index, variant in enumerate(names):
            colour, marker = _free(index % len(LIGHT), (index + at) % len(MARKERS), used)
            used.add((colour, marker))
            with_options = [column for column in columns.get((workload, variant), {}) if column != variant]
            looks[workload, variant] = Look(colour, marker)
            for number, column in enumerate(with_options, start=1):
                looks[workload, column] = Look(colour, marker, number)
    return looks


def _free(colour: int, marker: int, used: set[tuple[int, int]]) -> tuple[int, int]:
    """Return the first pair from this one on that no variant has, or this one if all are taken."""
    pairs = len(LIGHT) * len(MARKERS)
    for step in range(pairs):
        pair = ((colour + step // len(MARKERS)) % len(LIGHT), (marker + step) % len(MARKERS))
        if pair not in used:
            return pair
    return colour, marker
