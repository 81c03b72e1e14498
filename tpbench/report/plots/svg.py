"""A figure as SVG, drawn once. Imports matplotlib, which not everyone has."""

from __future__ import annotations

import functools
import io
from typing import Literal

from matplotlib.backends.backend_svg import FigureCanvasSVG, RendererSVG
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path


def as_svg(figure: Figure) -> str:
    """The figure as the text of an SVG file, without what says when and by what it was made.

    `savefig` would draw it twice, the first time for its layout alone, and measure every text anew for each.
    """
    out = io.StringIO()
    figure.dpi = FigureCanvasSVG.fixed_dpi
    renderer = _Renderer(*figure.bbox.size, out, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    _Canvas(figure, renderer)
    figure.draw(renderer)
    renderer.finalize()
    return out.getvalue()


class _Renderer(RendererSVG):
    """Measures a text once for all figures: those of a page name the same problems and variants."""

    def get_text_width_height_descent(
        self, s: str, prop: FontProperties, ismath: bool | Literal["TeX"]
    ) -> tuple[float, float, float]:
        return _measure(s, prop, ismath)


class _Canvas(FigureCanvasSVG):
    """Lays the figure out with the renderer that draws it."""

    def __init__(self, figure: Figure, renderer: RendererSVG) -> None:
        super().__init__(figure)
        self._draws = renderer

    def get_renderer(self) -> RendererSVG:
        """What a layout asks the canvas for, and would make anew where it has none."""
        return self._draws


@functools.lru_cache(maxsize=4096)
def _measure(text: str, font: FontProperties, math: bool | Literal["TeX"]) -> tuple[float, float, float]:
    return text_to_path.get_text_width_height_descent(text, font, math)
