"""How many times slower than the fastest, with intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpbench.report.layout import Section
from tpbench.report.plots import style
from tpbench.report.samples import CLOCKS, speedups

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(section: Section, clock: str) -> Figure | None:
    """A dot for each column of each problem but the fastest, or None where nothing can be compared."""
    found = speedups(section, clock)
    if not found:
        return None
    figure = style.new_figure(7.5, 0.9 + 0.21 * len(found))
    axes = figure.subplots()
    for place, each in enumerate(found):
        low, high = each.ratio.low or each.ratio.value, each.ratio.high or each.ratio.value
        axes.errorbar(
            each.ratio.value, place, xerr=[[each.ratio.value - low], [high - each.ratio.value]], capsize=2,
            fmt=style.marker(each.other.column), color=style.colour(each.other.column),
        )  # fmt: skip
    axes.axvline(1, color=style.ink(), linewidth=1)
    if axes.get_xlim()[1] > 4:
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(lambda value, _: f"{value:g}x" if f"{value:e}"[0] in "235" else "")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    names = [style.short(f"{each.fastest.head} over {each.other.head}  {each.problem}", 90) for each in found]
    axes.set_yticks(range(len(found)), names, fontsize=7)
    axes.set_ylim(len(found) - 0.4, -0.6)
    figure.supxlabel(f"speed-up of the fastest, {CLOCKS[clock]} time (95% interval)", fontsize=8)
    return figure
