"""Tables and pictures that a workload computes from rows for a study. The report prints and draws them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StudyTable:
    """A table of texts. A table without columns consists of its heading and notes."""

    heading: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    """Values that hold for all rows, by name: further columns of a CSV file."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Series:
    """Points (x, y) of one series, in order of x."""

    label: str
    points: tuple[tuple[float, float], ...]


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
    """Panels of ratios with a common, logarithmic y axis. Series with the same label share their colour."""

    panels: tuple[Panel, ...]
    x_label: str
    y_label: str
