"""Pictures of lines over panels, and speed-ups over a baseline, which the report draws."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Series:
    """Points (x, y) of one series, in order of x."""

    label: str
    points: tuple[tuple[float, float], ...]
    dashed: bool = False
    """True for another clock of the series with the same label. Its line is dashed and left out of the legend."""
    texts: tuple[str, ...] = ()  # beside each point
    crosses: tuple[float, ...] = ()  # values of x at which memory ran out
    intervals: tuple[tuple[float, float], ...] = ()  # lower and upper end of each point's error bar
    hovers: tuple[str, ...] = ()  # what a browser shows of each point under the mouse


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    lines: tuple[Series, ...]
    floor: tuple[tuple[float, float], ...] = ()  # points of the lower limit of all series
    no_gain_to: float = 0.0  # smaller values of x are shaded: no series gains there
    categories: tuple[str, ...] = ()  # names of x = 0, 1, ..., unless x is a number


@dataclass(frozen=True)
class Picture:
    """Panels with a common y axis. Series with the same label share their colour."""

    panels: tuple[Panel, ...]
    x_label: str
    y_label: str
    scale: Literal["ratios", "logarithmic", "from zero"] = "ratios"
    """The y axis. Ratios are logarithmic, too. From zero, both axes begin at 0, and points are not joined."""
    doubling: tuple[float, ...] = ()
    """Values of x that the axis marks, at equal distances if each is twice the one before. Empty: a linear axis."""
    labels: tuple[str, ...] = ()  # of series in the order of their colours; by default of the alphabet
    heading: str = ""  # above all panels


def oldest_first(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return rows in the order in which their jobs started, after those without a time."""
    return sorted(rows, key=lambda row: (row["started_at"] is not None, row["started_at"] or 0))


@dataclass(frozen=True)
class Speedups:
    """How many times faster than a baseline implementations are, over an axis, for one problem."""

    facts: Mapping[str, Any]  # columns that agree in all rows
    by_clock: Mapping[str, pd.DataFrame]
    """By the name of a time's column: a line for each value of the axis, a column for each implementation."""

    @classmethod
    def over(cls, baseline: str, times: pd.DataFrame, facts: Mapping[str, Any], *, median: bool = False) -> Speedups:
        """Divide the times of the baseline, or their median, by those of the other columns, (clock, implementation)."""
        by_clock: dict[str, Any] = {}
        for clock in times.columns.unique(0):
            base: Any = times[clock].get(baseline, math.nan)
            others = times[clock].drop(columns=baseline, errors="ignore")
            ratios: Any = others.rdiv(base.median() if median and baseline in times[clock] else base, axis="index")
            if (ratios := ratios.dropna(how="all").dropna(how="all", axis="columns")).size:
                by_clock[str(clock)] = ratios
        return cls(facts, by_clock)

    @property
    def axis(self) -> list[Any]:
        return sorted({x for ratios in self.by_clock.values() for x in ratios.index})

    @property
    def names(self) -> list[str]:
        return sorted({str(name) for ratios in self.by_clock.values() for name in ratios})

    def panel(self, title: str, unit: float = 1) -> Panel:
        """Return a line for each implementation and clock, over the axis in this unit. Wall times are dashed."""
        lines = []
        for name in self.names:
            for clock, ratios in self.by_clock.items():
                points: dict[Any, float] = ratios[name].dropna().to_dict() if name in ratios else {}
                if points:
                    lines.append(Series(name, tuple((unit * x, y) for x, y in points.items()), clock == "time_ms"))
        return Panel(title, tuple(lines))
