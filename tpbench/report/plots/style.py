"""Look of the plots, and conversion of figures to svg and png."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tpbench import packages
from tpbench.settings import JobError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LIGHT = (
    "#1668b8", "#c4420c", "#1b7f4d", "#8b3fb0", "#a8730a", "#c2185b", "#00808a", "#6b5b4b", "#6a7d00", "#4a3fb5",
    "#7a1f2b", "#51606e",
)  # fmt: skip
DARK = (
    "#6cb2ff", "#ff9a66", "#5fd39b", "#d6a1f5", "#ecc04d", "#ff86b4", "#4fd6e0", "#cbbba8", "#b9cf3f", "#a39bff",
    "#e07a86", "#aab8c6",
)  # fmt: skip
"""Colours of series on a light and on a dark background."""
MARKERS = "os^DvP<"  # one fewer than colours, so that the pairs repeat late
INK, FAINT, GROUND = "#222222", "#b3b3b3", "#ffffff"
"""Colours of text and of lines that belong to no series, of grid lines and of the background."""
_DARK_MODE = "".join(
    f'[style*="{part}: {light}"] {{ {part}: {dark} !important }} '
    for light, dark in zip((*LIGHT, INK, FAINT, GROUND), (*DARK, "#e4e6e8", "#3a4048", "#15181b"), strict=True)
    for part in ("fill", "stroke")
)
_DARK_MODE = f" <style>@media (prefers-color-scheme: dark) {{ {_DARK_MODE}}}</style>"
"""Style of an svg file: browsers show it in dark colours to readers who prefer these."""


def available() -> bool:
    """Return true if matplotlib is installed."""
    return packages.installed("matplotlib")


def require() -> None:
    """Raise JobError with the install command if matplotlib is missing."""
    if not available():
        raise JobError(f"plots need matplotlib: {packages.install_command('report')}")


def _import_matplotlib() -> None:
    """Import matplotlib, which reads MPLBACKEND only then, and leave the variable to other programs as it was."""
    before = os.environ.get("MPLBACKEND")
    os.environ["MPLBACKEND"] = "agg"
    importlib.import_module("matplotlib")
    os.environ.pop("MPLBACKEND")
    if before is not None:
        os.environ["MPLBACKEND"] = before


@contextlib.contextmanager
def drawing(name: str) -> Iterator[None]:
    """Set the style under which a figure is made and written. `name` makes its ids the same in every run.

    The user's matplotlibrc and MPLBACKEND count for nothing: Jupyter sets a backend that other programs may lack.
    """
    _import_matplotlib()
    import matplotlib

    settings: Any = {  # matplotlib names hundreds of keys in its type
        "text.parse_math": False,  # a dollar sign in a name is a dollar sign
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "font.family": "sans-serif",
        "font.size": 9,
        "axes.titlesize": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.linewidth": 0.4,
        "grid.color": FAINT,
        "legend.frameon": False,
        "lines.linewidth": 1.4,
        "lines.markersize": 4.5,
    }
    settings |= dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), GROUND)
    settings |= dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(settings)
        yield


def colour(index: int) -> str:
    """Return the colour of a series."""
    return LIGHT[index % len(LIGHT)]


def marker(index: int) -> str:
    """Return the marker of a series, for readers who cannot distinguish the colours."""
    return MARKERS[index % len(MARKERS)]


def short(name: str, limit: int = 70) -> str:
    """Return a name, cut to `limit` letters."""
    return name if len(name) <= limit else f"{name[: limit - 3]}..."


def legend_columns(texts: Sequence[str], inches: float) -> int:
    """Return how many columns of a legend fit into that width, at most three."""
    return max(1, min(3, int(inches / legend_inches(texts))))


def legend_inches(texts: Sequence[str]) -> float:
    """Return the width of a legend of one column. A figure that is narrower would cut the longest text."""
    return 0.07 * max(map(len, texts), default=1) + 0.6


def common_legend(figure: Figure, panels: Iterable[Axes], columns: int, place: Any) -> None:
    """Put one legend of all panels at a place outside of them. Equal labels appear once."""
    handles: dict[str, Any] = {}
    for axes in panels:
        handles |= {text: handle for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc=place, ncols=columns)


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of that size in inches, without a window."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def file_content(figure: Figure, form: str) -> bytes:
    """Return the figure as a file in the format "svg" or "png", without a date and a creator."""
    out = io.BytesIO()
    if form == "png":
        figure.savefig(out, format="png", dpi=160, metadata={"Software": None})
    else:
        from matplotlib.backends.backend_svg import FigureCanvasSVG

        # `savefig` would draw the figure twice, once for its layout.
        canvas: Any = FigureCanvasSVG(figure)
        canvas.print_svg(out, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
        return out.getvalue().replace(b" <defs>", f"{_DARK_MODE}\n <defs>".encode(), 1)
    return out.getvalue()


def inline_svg(figure: Figure) -> str:
    """Return the figure as an `svg` element in the colours of a page, which has a light and a dark set of them."""
    text = file_content(figure, "svg").decode().replace(_DARK_MODE, "")
    text = text[text.index("<svg") :]
    text = _GROUP_ID.sub("", _HEIGHT.sub("", text, count=1))
    for at, value in enumerate(LIGHT):
        text = text.replace(value, f"var(--s{at})")
    for value, name in ((INK, "--ink"), (FAINT, "--faint"), (GROUND, "--ground")):
        text = text.replace(value, f"var({name})")
    return text


_HEIGHT = re.compile(r' height="[\d.]+pt"')
_GROUP_ID = re.compile(r' id="[A-Za-z0-9.]+_\d+"')
"""Ids of matplotlib's groups, which are the same in every figure. Nothing refers to them."""
