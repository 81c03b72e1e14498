"""Plot the most tokens that fit into a GPU, for several GPUs and models that share their memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tpbench.predict.cells import MeasuredCell
from tpbench.predict.memory import MODELS, TrainedModel, free_gib
from tpbench.predict.model import VariantModel
from tpbench.report.plots import style
from tpbench.workloads.cost_model import FeasibilityPlot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GPU_MEMORY_GIB = (80.0, 141.0)
FEWEST_TOKENS, MOST_TOKENS = 2**9, 2**20
_STYLES = (":", "-.", "--", "-")


def most_tokens(model: VariantModel, size: Any, gpu_gib: float, beside: TrainedModel | None) -> float:
    """Return the most tokens that are predicted to fit, 0 if none do. The tokens of `size` itself do not matter."""

    def fits(tokens: int) -> bool:
        tried = replace(size, tokens=tokens)
        peak_gib = model.fits("peak_gib", tried)
        return peak_gib is not None and tried.inputs_gib + peak_gib <= free_gib(gpu_gib, tried, beside)

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high > low + max(1, low // 500):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def draw(models: Sequence[VariantModel], plot: FeasibilityPlot, cells: Sequence[MeasuredCell], size: Any) -> Figure:
    """Draw a panel for each GPU and each model in training: predictions as lines, measured cells as marks.

    Marks are of the first variant. `size` says everything but the tokens and the axes, for example the loss.
    """
    beside: list[TrainedModel | None] = [None, *MODELS.values()]
    figure = style.new_figure(12.5, 7)
    grid = figure.subplots(len(GPU_MEMORY_GIB), len(beside), sharex=True, sharey=True)
    marked = [cell for cell in cells if cell.label == models[0].label and cell.size.kind == size.kind]
    for line, gpu_gib in zip(grid, GPU_MEMORY_GIB, strict=True):
        for axes, model in zip(line, beside, strict=True):
            for at, variant in enumerate(models):
                colour = style.colour(len(plot.variants) - 1 - at)
                limit = functools.partial(most_tokens, variant, gpu_gib=gpu_gib, beside=model)
                _lines(axes, plot, size, limit, variant.label, colour)
            _marks(axes, marked, plot, gpu_gib, model)
            title = f"beside a model of {model.name} on {model.gpus} GPUs" if model else "the loss alone"
            axes.set_title(f"{gpu_gib:g} GB GPU, {title}", fontsize=8)
    for axes in grid[-1]:
        axes.set_xlabel(plot.x[0])
    for axes in grid[:, 0]:
        axes.set_ylabel("tokens per replica")
    _scale(grid[0][0], plot.x[1])
    handles = {
        text: handle for axes in grid.flat for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize=8)
    kind = size.kind.partition("=")[2]
    figure.suptitle(f"Above its line a variant runs out of memory ({kind}, predicted); marks: measured", fontsize=9)
    return figure


def _scale(axes: Axes, values: Sequence[int]) -> None:
    """Scale both axes, which all panels share, by doublings: `values` along x, tokens along y."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_ylim(FEWEST_TOKENS, MOST_TOKENS)
    axes.set_xticks(values, [f"{value // 1024}k" for value in values])
    axes.set_yticks([2**power for power in range(9, 21, 2)], ["512", "2k", "8k", "32k", "128k", "512k"])
    axes.minorticks_off()


def _lines(
    axes: Axes, plot: FeasibilityPlot, size: Any, limit: Callable[[Any], float], variant: str, colour: str
) -> None:
    """Draw the most tokens that fit, `limit(size)`, along x: a line for each value of `plot.lines`."""
    (x, x_values), (name, line_values) = plot.x, plot.lines
    for value, line_style in zip(line_values, _STYLES, strict=False):
        sizes = [replace(size, **{x: x_value, name: value}) for x_value in x_values]
        label = f"{variant} {name.removesuffix('_size')} {value}, predicted"
        axes.plot(x_values, [limit(tried) for tried in sizes], line_style, color=colour, label=label)


def _marks(
    axes: Axes, cells: Sequence[MeasuredCell], plot: FeasibilityPlot, gpu_gib: float, beside: TrainedModel | None
) -> None:
    """Mark measured cells: whether their measured memory fits here. Cells of different lines stand side by side."""
    name, values = plot.lines
    for cell in cells:
        free = free_gib(gpu_gib, cell.size, beside)
        fits = cell.peak_gib is not None and cell.size.inputs_gib + cell.peak_gib <= free
        if cell.status == "oom" and beside is None and gpu_gib == max(GPU_MEMORY_GIB):
            fits = False
        elif cell.peak_gib is None:
            continue  # out of memory on a GPU of another size
        value = getattr(cell.size, name)
        axes.plot(
            getattr(cell.size, plot.x[0]) * 1.05 ** (values.index(value) if value in values else 0),
            cell.size.tokens,
            "o" if fits else "X",
            color=style.INK if fits else style.colour(5), markersize=4 if fits else 6, linestyle="",
            label=f"{cell.label}, measured: {'fits' if fits else 'out of memory'}",
        )  # fmt: skip
