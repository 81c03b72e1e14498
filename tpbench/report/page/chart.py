"""Small charts as SVG text: lines over categories. Made for pages, where they cost no library and little time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from tpbench.report.analysis.metrics import number
from tpbench.report.page.column_styles import MARKERS, Look

WIDTH, HEIGHT = 320, 220
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 30, 34
LETTER, TITLE_LETTER = 5.6, 6.7
"""Width of a letter of a label and of a title, in units of the chart."""
GAP = 30.0
"""A logarithmic axis ends above values that are so many times smaller than all others."""


@dataclass(frozen=True)
class Line:
    """One line: pairs of a category's index and a positive value."""

    name: str
    look: Look | None
    """None: a dashed line in the colour of text, without markers."""
    points: Sequence[tuple[int, float]]
    crosses: Sequence[int] = ()
    """Categories in which the line has no value because memory ran out."""


@dataclass(frozen=True)
class Panel:
    """One chart: lines over categories."""

    title: str
    categories: Sequence[str]
    lines: Sequence[Line]
    axis: str
    """Name of the key that the categories are values of."""
    joined: bool = True
    """False: markers without lines between them."""

    @property
    def is_drawable(self) -> bool:
        """True if some line has two points: a single point is no picture."""
        return any(line.look and len(line.points) > 1 for line in self.lines)


@dataclass(frozen=True)
class Axis:
    """The vertical axis that panels share."""

    low: float
    high: float
    unit: str
    logarithmic: bool = True

    def share(self, value: float) -> float:
        """Return the position of a value: 0 at the low end, 1 at the high end."""
        if not self.logarithmic:
            return (max(value, self.low) - self.low) / (self.high - self.low)
        return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)

    @property
    def ticks(self) -> list[float]:
        """The marks: on a logarithmic axis powers of ten, with multiples of them if it is short."""
        if not self.logarithmic:
            step = 10 ** math.floor(math.log10(self.high)) / 5
            step *= next(factor for factor in (1, 2, 5, 10) if self.high / (step * factor) <= 6)
            return [step * at for at in range(int(self.high / step) + 1)]
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        length = self.high / self.low
        factors: tuple[float, ...] = (1, 1.5, 2, 3, 4, 5, 7) if length < 6 else (1, 2, 5) if length < 200 else (1,)
        candidates = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
        return [value for value in candidates if self.low <= value <= self.high]


def share_axis(values: Sequence[float]) -> Axis:
    """Return the axis of shares of a limit in percent, from 0 to 100 or more."""
    return Axis(0, max(100.0, *values) * 1.04, "%", logarithmic=False)


def logarithmic_axis(values: Sequence[float], unit: str) -> Axis:
    """Return a logarithmic axis for these positive values.

    The axis leaves out the few values that are far below all others: one variant that works in place, with a memory
    near zero, must not stretch it.
    """
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1]
    for at, (below, above) in enumerate(itertools.pairwise(ordered), start=1):
        if above > GAP * below and below < high / 1000 and at <= len(ordered) / 3:
            low = above
    if high < 2 * low:
        low, high = low / 1.4, high * 1.4
    return Axis(low / 1.12, high * 1.12, unit)


def panel_svg(panel: Panel, axis: Axis, *, tips: bool = False) -> str:
    """Return a panel as an `svg` element. `tips`: each marker tells its value if the pointer rests on it."""
    inner, tall = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    count = len(panel.categories)

    def across(category: int) -> float:
        return round(LEFT + inner * (category + 0.5) / count, 1)

    def upright(value: float) -> float:
        return round(TOP + tall * (1 - axis.share(value)), 1)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(panel.title, quote=True)}">']
    parts += _title(panel.title)
    for value in axis.ticks:
        height = upright(value)
        parts.append(f'<path class="rule" d="M{LEFT} {height}h{inner}"/>')
        parts.append(f'<text class="y" x="{LEFT - 5}" y="{height + 3.5}">{value:g}</text>')
    parts += _categories(panel, across)
    for line in panel.lines:
        inside = [(across(at), upright(value)) for at, value in sorted(line.points) if value >= axis.low]
        if line.look is None:
            parts.append(f'<path class="floor" d="{_polyline(inside)}"/>')
            continue
        if panel.joined and len(inside) > 1:
            parts.append(f'<path d="{_polyline(inside)}" style="{line.look.stroke}"{line.look.dashes}/>')
        parts += _markers(line, across, upright, axis, tips=tips)
    parts.append("</svg>")
    return "".join(parts)


def marker_svg(look: Look) -> str:
    """Return the line and the marker of a column, for a legend."""
    line = f'<path d="M1 6h22" style="{look.stroke}"{look.dashes}/>'
    marker = f'<path d="M12 6{MARKERS[look.marker]}" style="{_css(look)}"/>'
    return f'<svg class="key" viewBox="0 0 24 12" aria-hidden="true">{line}{marker}</svg>'


def _css(look: Look) -> str:
    return f"{look.stroke};{look.fill}"


def _title(title: str) -> list[str]:
    """Return the title in at most two lines of text."""
    letters = int((WIDTH - 8) / TITLE_LETTER)
    words, lines = title.split(), [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + len(word) + 1 > letters:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    if len(lines) > 2:
        lines = [lines[0], f"{lines[1][: letters - 3]}..."]
    return [f'<text class="t" x="4" y="{11 + 12 * at}">{escape(text)}</text>' for at, text in enumerate(lines) if text]


def _categories(panel: Panel, across: Callable[[int], float]) -> list[str]:
    """Return the labels of the categories, as many as fit, and the name of the axis."""
    widest = max(map(len, panel.categories), default=1) * LETTER + 8
    every = max(1, math.ceil(widest * len(panel.categories) / (WIDTH - LEFT - RIGHT)))
    below = HEIGHT - BOTTOM + 13
    labels = [
        f'<text class="x" x="{across(at)}" y="{below}">{escape(text)}</text>'
        for at, text in enumerate(panel.categories)
        if at % every == 0
    ]
    middle = (LEFT + WIDTH - RIGHT) / 2
    return [*labels, f'<text class="x" x="{middle:g}" y="{below + 15}">{escape(panel.axis)}</text>']


def _polyline(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in points) if points else ""


def _markers(
    line: Line, across: Callable[[int], float], upright: Callable[[float], float], axis: Axis, *, tips: bool
) -> list[str]:
    """Return the markers of a line. A value below the axis becomes an arrow, a lack of memory a cross at the top."""
    assert line.look is not None
    shape = MARKERS[line.look.marker]
    inside = [(at, value) for at, value in sorted(line.points) if value >= axis.low]
    below = "".join(
        f"M{across(at)} {HEIGHT - BOTTOM - 9}v7m-3-3l3 3l3-3" for at, value in line.points if value < axis.low
    )
    above = "".join(f"M{across(at) - 3} {TOP + 1}l6 6m0-6l-6 6" for at in line.crosses)
    markers = []
    if tips:
        markers += [
            f'<path d="M{across(at)} {upright(value)}{shape}" style="{_css(line.look)}"><title>'
            f"{escape(line.name)}: {number(value)} {escape(axis.unit)}</title></path>"
            for at, value in inside
        ]
    elif inside:
        path = "".join(f"M{across(at)} {upright(value)}{shape}" for at, value in inside)
        markers.append(f'<path d="{path}" style="{_css(line.look)}"/>')
    return [*markers, *(f'<path d="{path}" style="{line.look.stroke}"/>' for path in (below, above) if path)]
