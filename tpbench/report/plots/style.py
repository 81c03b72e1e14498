"""Look of the plots, and conversion of figures to svg and png."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tpbench import packages
from tpbench.settings import JobError

if TYPE_CHECKING:
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
_RULES = "".join(
    f'[style*="{part}: {light}"] {{ {part}: {dark} !important }} '
    for light, dark in zip((*LIGHT, INK, FAINT, GROUND), (*DARK, "#e4e6e8", "#3a4048", "#15181b"), strict=True)
    for part in ("fill", "stroke")
)
_DARK_MODE = f" <style>@media (prefers-color-scheme: dark) {{ {_RULES}}}</style>"
"""Style of an svg file: browsers show it in dark colours to readers who prefer these."""


def available() -> bool:
    """Return true if matplotlib is installed."""
    return packages.installed("matplotlib")


@contextlib.contextmanager
def drawing(name: str) -> Iterator[None]:
    """Set the style under which a figure is made and written. `name` makes its ids the same in every run.

    The user's matplotlibrc and MPLBACKEND count for nothing: Jupyter sets a backend that other programs may lack.
    Raises JobError with the install command if matplotlib is missing.
    """
    if not available():
        raise JobError(f"plots need matplotlib: {packages.install_command('report')}")
    before = os.environ.get("MPLBACKEND")
    os.environ["MPLBACKEND"] = "agg"  # matplotlib reads it when it is imported
    import matplotlib

    os.environ.pop("MPLBACKEND")
    os.environ |= {} if before is None else {"MPLBACKEND": before}
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


def file_content(figure: Figure, form: str) -> bytes:
    """Return the figure as a file in the format "svg" or "png", without a date and a creator."""
    if form == "svg":
        return _svg(figure).replace(" <defs>", f"{_DARK_MODE}\n <defs>", 1).encode()
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=160, metadata={"Software": None})
    return out.getvalue()


def _svg(figure: Figure) -> str:
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    out = io.BytesIO()
    canvas: Any = FigureCanvasSVG(figure)  # `savefig` would draw the figure twice, once for its layout
    canvas.print_svg(out, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return out.getvalue().decode()


def inline_svg(figure: Figure) -> str:
    """Return the figure as an `svg` element in the colours of a page, which has a light and a dark set of them."""
    text = _svg(figure)
    text = re.sub(r' height="[\d.]+pt"', "", text[text.index("<svg") :], count=1)
    # Identifiers of groups: every figure has the same ones, and nothing refers to them.
    text = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", text)
    names = {value: f"s{at}" for at, value in enumerate(LIGHT)} | {INK: "ink", FAINT: "faint", GROUND: "ground"}
    for value, name in names.items():
        text = text.replace(value, f"var(--{name})")
    return text
