"""Figures of matplotlib as text: everything that a drawing function decides, one line for each element."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure


def described(figure: Figure) -> str:
    """Return the size, and for each panel its labels, limits, ticks and shapes. Numbers have four digits."""
    lines = [f"figure {_numbers(figure.get_size_inches())}"]
    lines += [f"text {each.get_text()!r}" for each in figure.texts]
    for axes in figure.axes:
        lines += ["", *_panel(axes)]
    for legend in figure.legends:
        lines += ["", f"legend of {legend._ncols} columns", *(f"  {each.get_text()}" for each in legend.get_texts())]
    return "\n".join(lines) + "\n"


def _panel(axes: Axes) -> Iterable[str]:
    titles = [title for title in (axes.get_title(), axes.get_title(loc="left")) if title]
    yield f"panel {titles} x={axes.get_xlabel()!r} y={axes.get_ylabel()!r} visible={axes.get_visible()}"
    for name, axis, limits in (("x", axes.xaxis, axes.get_xlim()), ("y", axes.yaxis, axes.get_ylim())):
        fixed = [text.get_text() for text in axis.get_ticklabels()] if axis.get_scale() == "linear" else []
        yield f"  {name} {axis.get_scale()} {_numbers(limits)} {fixed}"
    for line in axes.get_lines():
        label = "" if str(line.get_label()).startswith("_") else line.get_label()
        look = f"{to_hex(line.get_color())} {line.get_linestyle()} {line.get_marker()} {line.get_linewidth():g}"
        yield f"  line {label!r} {look} x={_numbers(line.get_xdata())} y={_numbers(line.get_ydata())}"
    for shapes in axes.collections:
        colours = [to_hex(each) for each in np.atleast_2d(shapes.get_facecolor())[:1]]
        paths: Any = [_numbers(path.vertices.ravel()) for path in shapes.get_paths()[:3]]
        yield f"  shapes {colours} {_numbers(np.atleast_1d(shapes.get_linewidth()))} {len(shapes.get_paths())} {paths}"
    for text in axes.texts:
        yield f"  text {text.get_text()!r} {_numbers(text.get_position())} {text.get_in_layout()}"


def _numbers(values: Any) -> list[float]:
    found = [float(f"{float(value):.4g}") for value in np.ravel(np.asarray(values, dtype=float))]
    return found if len(found) <= 12 else [*found[:6], float(len(found)), *found[-5:]]
