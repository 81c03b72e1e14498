"""Share of the bandwidth by block cap, a line for each problem: why one cap is slow."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

from tpbench.report.layout import Section
from tpbench.report.pivot import mark
from tpbench.report.plots import style
from tpbench.report.records import order, say
from tpbench.report.samples import problem_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(section: Section) -> Figure | None:
    """A panel for each variant, or None where no variant was measured at two block caps."""
    lines = shares(section)
    panels = sorted({head for head, _ in lines})
    if not panels:
        return None
    caps = sorted({cap for line in lines.values() for cap in line}, key=order)
    problems = list(dict.fromkeys(problem for _, problem in lines))
    figure = style.new_figure(max(5.2, 3.6 * len(panels)), 2.9 + 0.17 * -(-len(problems) // len(panels)))
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, panel in zip(grid, panels, strict=True):
        for (head, problem), line in lines.items():
            if head == panel:
                index = problems.index(problem)
                points = [(caps.index(cap), 100 * line[cap]) for cap in caps if cap in line]
                axes.plot(
                    *zip(*points, strict=True), label=problem, color=style.colour(index), marker=style.marker(index)
                )
        axes.set_title(panel)
        axes.set_xticks(range(len(caps)), caps)
        axes.set_xlabel("block cap (columns)")
        axes.set_ylim(0, max(100, axes.get_ylim()[1]))
    grid[0].set_ylabel("share of the copy bandwidth (%)")
    handles = {text: handle for axes in grid for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=max(1, len(panels)))
    return figure


def shares(section: Section) -> dict[tuple[str, str], dict[str, float]]:
    """By variant (with its other options) and problem: block cap to share of the bandwidth, where there are two."""
    lines: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for row in section.rows:
        problem = problem_of(section, row.key)
        for head, record in zip(section.heads, row.records, strict=True):
            if record and record["status"] == "ok" and not mark(record) and record["fraction_of_floor"] is not None:
                bare = re.sub(r" block_cap=\S+", "", head)
                lines[bare, problem][say(record["block_cap"])] = record["fraction_of_floor"]
    return {key: line for key, line in lines.items() if len(line) > 1}
