"""Registration of plots. A plot is a function from a grid to a figure, or to None if there is nothing to draw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from tpbench.report.analysis.grid import RecordGrid

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Draw: TypeAlias = "Callable[[RecordGrid], Figure | None]"


@dataclass(frozen=True)
class Plot:
    """One kind of picture."""

    title: str
    draw: Draw
    columns: tuple[str, ...]
    """Columns that the records must have."""


PLOTS: dict[str, Plot] = {}
"""Every plot by its name on the command line, in the order of help."""


def plot(name: str, title: str, *, columns: tuple[str, ...]) -> Callable[[Draw], Draw]:
    """Register the decorated function as the plot of that name."""

    def register(draw: Draw) -> Draw:
        if name in PLOTS:
            raise ValueError(f"two plots are called {name}")
        PLOTS[name] = Plot(title, draw, columns)
        return draw

    return register
