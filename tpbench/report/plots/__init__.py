"""Plots of a grid of records. To add one, write a module with a function under `@plot` and name it in `MODULES`.

The modules, in the order of a first reading: `registry` has `@plot`, `style` the look of all plots. `by_size` draws a
metric by size, for `time` and `memory`. `speedups`, `samples`, `block_cap` and `timeline` are the other plots, and
`panels` draws the picture of a workload's study.
"""

from __future__ import annotations

import importlib

from tpbench.report.analysis.grid import RecordGrids
from tpbench.report.plots import style
from tpbench.report.plots.panels import draw_panels
from tpbench.report.plots.registry import PLOTS as PLOTS
from tpbench.settings import JobError
from tpbench.suggestions import unknown
from tpbench.workloads.study_data import Picture

MODULES = ("time", "block_cap", "memory", "speedups", "samples", "timeline")
"""Modules of this folder that register plots, in the order of help."""
for _module in MODULES:
    importlib.import_module(f"{__name__}.{_module}")

COLUMNS = tuple(dict.fromkeys(column for plot in PLOTS.values() for column in plot.columns))
"""Columns that records need so that every plot can be drawn."""


def picture(arranged: RecordGrids, name: str, form: str) -> bytes:
    """Return the plot of the one grid that has it, as an svg or png file.

    Raises JobError if matplotlib or the plot is missing, or if several grids have it.
    """
    style.require()
    if name not in PLOTS:
        raise JobError(unknown("plot", name, PLOTS))
    with style.drawing(name):
        drawn = [(grid, figure) for grid in arranged.grids if (figure := PLOTS[name].draw(grid))]
        if not drawn:
            raise JobError(f"these rows have nothing for the plot {name}")
        if len(drawn) > 1:
            headings = "\n".join(f"  {grid.heading}" for grid, _ in drawn)
            raise JobError(
                f"the plot {name} shows one of these: choose with --loss, --dtype, --gpu-name ...\n{headings}"
            )
        grid, figure = drawn[0]
        figure.suptitle(grid.heading, fontsize=8)
        return style.file_content(figure, form)


def study_picture(picture: Picture, name: str, form: str) -> bytes:
    """Return the picture of a study as an svg or png file. Raises JobError if matplotlib is missing."""
    style.require()
    with style.drawing(name):
        return style.file_content(draw_panels(picture), form)
