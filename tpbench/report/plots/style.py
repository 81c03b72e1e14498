"""Look of the plots, and conversion of figures to svg and png."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
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
IN_LAYOUT = 8
"""Names beside a plot whose extent decides about the width of its margin: the longest ones."""


INK, FAINT, GROUND = "#222222", "#b3b3b3", "#ffffff"
"""Colours of text, of grid lines and of the background."""


def available() -> bool:
    """Return true if matplotlib is installed."""
    return packages.installed("matplotlib")


def require() -> None:
    """Raise JobError with the install command if matplotlib is missing."""
    if not available():
        raise JobError(f"plots need matplotlib: {packages.install_command('report')}")


@contextlib.contextmanager
def drawing(name: str) -> Iterator[None]:
    """Set the style under which a figure is made and written. `name` makes its ids the same in every run."""
    import matplotlib

    settings: Any = {  # matplotlib names hundreds of keys in its type
        "text.parse_math": False,  # a dollar sign in a name is a dollar sign
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "font.family": "sans-serif",
        "font.size": 9,
        "axes.titlesize": 9,
        "axes.titley": 1.0,  # the default position, without a search in each panel
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
    with matplotlib.rc_context(settings):
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


def ink() -> str:
    """Return the colour of text and of lines that belong to no series."""
    return INK


def common_legend(figure: Figure, panels: Iterable[Axes], columns: int) -> None:
    """Put one legend of all panels below them. Equal labels appear once."""
    handles: dict[str, Any] = {}
    for axes in panels:
        handles |= {text: handle for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns)


def name_lines(axes: Axes, names: Sequence[str]) -> None:
    """Write names at the left, one for each height from 0 down, with a grid line across.

    They look like ticks. But a tick consists of five artists, and hundreds of ticks would take most of the drawing
    time. For the same reason only the longest names take part in the layout.
    """
    from matplotlib import rcParams
    from matplotlib.markers import TICKLEFT

    heights = range(len(names))
    axes.set_yticks([])
    axes.set_ylim(len(names) - 0.4, -0.6)
    across = axes.get_yaxis_transform()
    axes.hlines(
        heights, 0, 1, rcParams["grid.color"], linewidth=rcParams["grid.linewidth"], transform=across, zorder=1.5
    )
    axes.plot(
        [0] * len(names), heights, linestyle="", marker=TICKLEFT, markersize=rcParams["ytick.major.size"],
        markeredgewidth=rcParams["ytick.major.width"], color=ink(), transform=across, clip_on=False, zorder=1.5,
    )  # fmt: skip
    padding = rcParams["ytick.major.size"] + rcParams["ytick.major.pad"]
    beside, vertical, horizontal = axes.get_yaxis_text1_transform(padding)
    shortest_in_layout = min(sorted(map(len, names))[-IN_LAYOUT:], default=0)
    for height, name in zip(heights, names, strict=True):
        text = axes.text(0, height, name, transform=beside, va=vertical, ha=horizontal, fontsize=7)
        text.set_in_layout(len(name) >= shortest_in_layout)


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of that size in inches, without a window."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def file_content(figure: Figure, form: str) -> bytes:
    """Return the figure as a file in the format "svg" or "png"."""
    return png(figure) if form == "png" else svg(figure)


def svg(figure: Figure) -> bytes:
    """Return the figure as an SVG file without a date and a creator.

    `savefig` would draw the figure twice, the first time only for its layout. Here the renderer that draws it also
    serves the layout. Each text is measured once for all figures, because they name the same problems and variants.
    """
    from matplotlib.backends.backend_svg import FigureCanvasSVG, RendererSVG

    out = io.StringIO()
    figure.dpi = FigureCanvasSVG.fixed_dpi
    metadata: dict[str, Any] = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    renderer: Any = RendererSVG(*figure.bbox.size, out, metadata=metadata)  # type: ignore[no-untyped-call]
    renderer.get_text_width_height_descent = _text_measure()
    canvas: Any = FigureCanvasSVG(figure)
    canvas.get_renderer = lambda: renderer
    figure.draw(renderer)
    renderer.finalize()
    return out.getvalue().encode()


@functools.cache
def _text_measure() -> Callable[..., tuple[float, float, float]]:
    """Return the function with which the renderer measures texts, with a cache."""
    from matplotlib.textpath import text_to_path

    return functools.lru_cache(maxsize=4096)(text_to_path.get_text_width_height_descent)


def png(figure: Figure) -> bytes:
    """Return the figure as a PNG file."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=160, metadata={"Software": None})
    return out.getvalue()
