"""How plots look, and how a figure becomes text for a page or a file."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tpbench.settings import JobError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LIGHT = ("#1668b8", "#c4420c", "#1b7f4d", "#8b3fb0", "#a8730a", "#c2185b", "#00808a", "#6b5b4b")
DARK = ("#6cb2ff", "#ff9a66", "#5fd39b", "#d6a1f5", "#ecc04d", "#ff86b4", "#4fd6e0", "#cbbba8")
MARKERS = "os^DvP<"  # one fewer than colours: the pairs repeat late


@dataclass(frozen=True)
class Palette:
    """Colours of series, of text, and of what stands behind."""

    series: tuple[str, ...]
    ink: str
    faint: str
    ground: str


ON_WHITE = Palette(LIGHT, "#222222", "#b3b3b3", "#ffffff")
STAND_INS = Palette(tuple(f"#fe01{index:02x}" for index in range(len(LIGHT))), "#fe02aa", "#fe02bb", "none")
"""For a page, which takes its own in their place: those know of dark mode."""

_palette: ContextVar[Palette] = ContextVar("palette", default=ON_WHITE)


def available() -> bool:
    """Whether matplotlib is there."""
    return importlib.util.find_spec("matplotlib") is not None


def require() -> None:
    """Raises JobError that says how to install what plots need."""
    if not available():
        raise JobError("plots need matplotlib: pip install 'tpbench[report]'")


@contextlib.contextmanager
def drawing(name: str, palette: Palette = ON_WHITE) -> Iterator[None]:
    """Settings under which a figure is made and written. `name` keeps the ids of two figures on one page apart."""
    import matplotlib

    settings: Any = {  # matplotlib names hundreds of keys in its type
        "text.parse_math": False,  # a dollar sign in a name is a dollar sign
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "font.family": "sans-serif",
        "font.size": 9,
        "axes.titlesize": 9,
        "axes.titley": 1.0,  # where it is anyway, and need not be looked for in each panel
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.linewidth": 0.4,
        "grid.color": palette.faint,
        "legend.frameon": False,
        "lines.linewidth": 1.4,
        "lines.markersize": 4.5,
    }
    settings |= dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), palette.ground)
    settings |= dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), palette.ink
    )
    token = _palette.set(palette)
    try:
        with matplotlib.rc_context(settings):
            yield
    finally:
        _palette.reset(token)


def colour(index: int) -> str:
    """The colour of a series."""
    series = _palette.get().series
    return series[index % len(series)]


def marker(index: int) -> str:
    """The marker of a series: who cannot tell the colours apart can tell these."""
    return MARKERS[index % len(MARKERS)]


def short(name: str, limit: int = 70) -> str:
    """A name that leaves room for the picture."""
    return name if len(name) <= limit else f"{name[: limit - 3]}..."


def legend_columns(texts: Sequence[str], inches: float) -> int:
    """How many columns of a legend fit into that width, at most three."""
    widest = max(map(len, texts), default=1)
    return max(1, min(3, int(inches / (0.07 * widest + 0.6))))


def ink() -> str:
    """The colour of text, and of what belongs to no series."""
    return _palette.get().ink


def name_lines(axes: Axes, names: Sequence[str]) -> None:
    """Names at the left, one at each height from 0 down, with a line across.

    They look like ticks. Each of those is five artists, and hundreds of them would take most of a picture's time.
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
    away = rcParams["ytick.major.size"] + rcParams["ytick.major.pad"]
    beside, vertical, horizontal = axes.get_yaxis_text1_transform(away)
    for height, name in zip(heights, names, strict=True):
        axes.text(0, height, name, transform=beside, va=vertical, ha=horizontal, fontsize=7)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of that many inches, unknown to any window system."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def inline_svg(figure: Figure) -> str:
    """A figure in stand-in colours as an `svg` element: its colours are the page's variables, its text is text."""
    made = svg(figure).decode()
    made = made[made.index("<svg") :]
    made = re.sub(r"<(metadata|style)\b.*?</\1>", "", made, flags=re.DOTALL)
    made = made.replace(STAND_INS.ink, "currentColor").replace(STAND_INS.faint, "var(--faint)")
    for index, stand_in in enumerate(STAND_INS.series):
        made = made.replace(stand_in, f"var(--s{index})")
    return re.sub(r"\n\s*", "\n", made).strip()


def svg(figure: Figure) -> bytes:
    """The figure as an SVG file."""
    from tpbench.report.plots.svg import as_svg

    return as_svg(figure).encode()


def png(figure: Figure) -> bytes:
    """The figure as a PNG file."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=160, metadata={"Software": None})
    return out.getvalue()
