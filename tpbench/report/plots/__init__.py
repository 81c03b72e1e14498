"""Pictures of a section: each is a function from a section to a figure, or None where there is nothing to show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from tpbench.report.layout import Layout, Section
from tpbench.report.plots import block_cap, by_size, speedup, spread, style, timeline
from tpbench.report.plots.garbage import swept_at_once
from tpbench.settings import JobError, unknown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Draw: TypeAlias = "Callable[[Section], Figure | None]"


@dataclass(frozen=True)
class Plot:
    """One kind of picture."""

    title: str
    draw: Draw


PLOTS = {
    "time": Plot("Wall time by size, with its floor", lambda section: by_size.draw(section, "time_ms", floor=True)),
    "device_time": Plot(
        "Device time by size, with its floor", lambda section: by_size.draw(section, "device_ms", floor=True)
    ),
    "block_cap": Plot("Share of the bandwidth by block cap", block_cap.draw),
    "memory": Plot("Extra peak memory by size", lambda section: by_size.draw(section, "peak_gib")),
    "speedup": Plot("Speed-ups, wall time", lambda section: speedup.draw(section, "samples_ms")),
    "device_speedup": Plot("Speed-ups, device time", lambda section: speedup.draw(section, "device_samples_ms")),
    "samples": Plot("Samples about their median, wall time", lambda section: spread.draw(section, "samples_ms")),
    "device_samples": Plot(
        "Samples about their median, device time", lambda section: spread.draw(section, "device_samples_ms")
    ),
    "timeline": Plot("A step of one problem, by stream", timeline.draw),
}
NEEDS = (
    "time_ms", "device_ms", "floor_ms", "peak_gib", "fraction_of_floor", "samples_ms", "device_samples_ms",
    *timeline.COLUMNS,
)  # fmt: skip
"""Columns that records need so that every plot can be drawn."""


@swept_at_once()
def inline(section: Section, name: str, salt: str) -> str | None:
    """A plot of a section as an `svg` element for a page."""
    with style.drawing(salt, style.STAND_INS):
        figure = PLOTS[name].draw(section)
        return None if figure is None else style.inline_svg(figure)


def picture(layout: Layout, name: str, form: str) -> bytes:
    """The one plot of that name as an svg or png file. Raises JobError where there is none, or more than one."""
    style.require()
    if name not in PLOTS:
        raise JobError(unknown("plot", name, PLOTS))
    made = []
    for section in layout.sections:
        with style.drawing(name):
            figure = PLOTS[name].draw(section)
            if figure is not None:
                figure.suptitle(section.heading, fontsize=8)
                made.append((section, style.png(figure) if form == "png" else style.svg(figure)))
    if not made:
        raise JobError(f"these rows have nothing for the plot {name}")
    if len(made) > 1:
        found = "\n".join(f"  {section.heading}" for section, _ in made)
        raise JobError(f"the plot {name} shows one of these: choose with --loss, --dtype, --gpu-name ...\n{found}")
    return made[0][1]
