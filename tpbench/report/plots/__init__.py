"""Plots of a grid of records, as files and in pages. A plot is a function from a grid to a figure; `PLOTS` names all.

The modules, in the order of a first reading: `style` is the look of all plots. `panels` draws lines over panels, for
studies of workloads and for `by_size`. `by_cell` draws a line for each cell, `timeline` traced steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tpbench.report.analysis.grid import RecordGrid, RecordGrids
from tpbench.report.analysis.metrics import DEVICE, WALL
from tpbench.report.plots import by_cell, by_size, style, timeline
from tpbench.report.plots.panels import draw_panels
from tpbench.settings import JobError
from tpbench.suggestions import unknown
from tpbench.workloads.study_data import Picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Plot:
    """One kind of picture."""

    title: str
    draw: Callable[[RecordGrid], Figure | None]
    """Return the figure of a grid, or None if there is nothing to draw."""
    columns: tuple[str, ...]
    """Columns that the records must have."""


PLOTS = {
    "time": Plot(
        "Wall time by size, with its floor", partial(by_size.draw, name="time_ms", floor=True), ("time_ms", "floor_ms")
    ),
    "device_time": Plot(
        "Device time by size, with its floor",
        partial(by_size.draw, name="device_ms", floor=True),
        ("device_ms", "floor_ms"),
    ),
    "block_cap": Plot("Share of the bandwidth by block cap", by_size.draw_block_caps, ("fraction_of_floor",)),
    "memory": Plot("Extra peak memory by size", partial(by_size.draw, name="peak_gib"), ("peak_gib",)),
    "speedup": Plot("Speed-ups, wall time", partial(by_cell.speedup, clock=WALL), ("samples_ms",)),
    "device_speedup": Plot("Speed-ups, device time", partial(by_cell.speedup, clock=DEVICE), ("device_samples_ms",)),
    "samples": Plot("Samples about their median, wall time", partial(by_cell.spread, clock=WALL), ("samples_ms",)),
    "device_samples": Plot(
        "Samples about their median, device time",
        partial(by_cell.spread, clock=DEVICE),
        ("device_samples_ms",),
    ),
    "timeline": Plot("A step of one problem, by stream", timeline.draw, timeline.COLUMNS),
}
"""Every plot by its name on the command line, in the order of help."""
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


def inline_picture(grid: RecordGrid, name: str, anchor: str) -> str | None:
    """Return a plot of a grid as an `svg` element for a page, or None if there is nothing to draw.

    `anchor`: the name of the grid on the page. The element's ids contain it, so that no two pictures share one.
    """
    with style.drawing(f"{name} {anchor}"):
        figure = PLOTS[name].draw(grid)
        return None if figure is None else style.inline_svg(figure)


def study_picture(picture: Picture, name: str, form: str) -> bytes:
    """Return the picture of a study as an svg or png file. Raises JobError if matplotlib is missing."""
    style.require()
    with style.drawing(name):
        return style.file_content(draw_panels(picture), form)
