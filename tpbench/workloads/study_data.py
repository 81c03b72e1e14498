"""Pictures that a workload computes from rows for a study. The report draws them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Series:
    """Points (x, y) of one series, in order of x."""

    label: str
    points: tuple[tuple[float, float], ...]
    dashed: bool = False
    """True for another clock of the series with the same label. Its line is dashed and left out of the legend."""
    texts: tuple[str, ...] = ()
    """Text beside each point. May be empty."""


@dataclass(frozen=True)
class VerticalLine:
    """A value of x that belongs to the series `label`."""

    label: str
    x: float
    dotted: bool = False


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    lines: tuple[Series, ...]
    vertical_lines: tuple[VerticalLine, ...] = ()


@dataclass(frozen=True)
class Picture:
    """Panels with a common y axis. Series with the same label share their colour."""

    panels: tuple[Panel, ...]
    x_label: str
    y_label: str
    ratios: bool = True
    """True: the y axis is logarithmic and shows ratios, and points are joined. False: both axes begin at 0, and points
    are not joined."""
    doubling: tuple[float, ...] = ()
    """Values of x that the axis marks, at equal distances if each is twice the one before. Empty: a linear axis."""


def oldest_first(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return rows in the order in which their jobs started, after those without a time."""
    return sorted(rows, key=lambda row: (row["started_at"] is not None, row["started_at"] or 0))
