"""Share of the bandwidth by block cap, a line for each problem: it shows which cap is slow."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

from tpbench.report.analysis.grid import RecordGrid
from tpbench.report.analysis.records import is_measurement, sort_key, value_text
from tpbench.report.plots import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(grid: RecordGrid) -> Figure | None:
    """Draw a panel for each variant. Return None if no variant was measured at two block caps."""
    lines = shares(grid)
    panels = sorted({variant for variant, _ in lines})
    if not panels:
        return None
    caps = sorted({cap for line in lines.values() for cap in line}, key=sort_key)
    problems = list(dict.fromkeys(problem for _, problem in lines))
    figure = style.new_figure(max(5.2, 3.6 * len(panels)), 2.9 + 0.17 * -(-len(problems) // len(panels)))
    row = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, panel in zip(row, panels, strict=True):
        for (variant, problem), line in lines.items():
            if variant == panel:
                index = problems.index(problem)
                points = [(caps.index(cap), 100 * line[cap]) for cap in caps if cap in line]
                axes.plot(
                    *zip(*points, strict=True), label=problem, color=style.colour(index), marker=style.marker(index)
                )
        axes.set_title(panel)
        axes.set_xticks(range(len(caps)), caps)
        axes.set_xlabel("block cap (columns)")
        axes.set_ylim(0, max(100, axes.get_ylim()[1]))
    row[0].set_ylabel("share of the copy bandwidth (%)")
    style.common_legend(figure, row, max(1, len(panels)))
    return figure


def shares(grid: RecordGrid) -> dict[tuple[str, str], dict[str, float]]:
    """Return the share of the bandwidth by block cap, for each variant and problem that have two block caps."""
    lines: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for cell in grid.cells():
        if is_measurement(cell.record) and cell.record["fraction_of_floor"] is not None:
            variant = re.sub(r" block_cap=\S+", "", cell.column)
            line = lines[variant, grid.problem_text(cell.key)]
            line[value_text(cell.record["block_cap"])] = cell.record["fraction_of_floor"]
    return {key: line for key, line in lines.items() if len(line) > 1}
