"""Where the gather becomes infeasible: over vocabulary, world size and tokens, for GPUs and what fills them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tpbench.predict.cells import Cell, Size
from tpbench.predict.memory import MODELS, Model, free_gib, verdict
from tpbench.predict.model import Estimate, VariantModel
from tpbench.report.plots import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

VOCABS = (32768, 65536, 131072, 262144)
TP_SIZES = (1, 2, 4, 8)
GPU_MEMORY_GIB = (80.0, 141.0)
LEAST, MOST = 2**9, 2**20
_STYLES = {1: ":", 2: "-.", 4: "--", 8: "-"}


def most_tokens(
    model: VariantModel, vocab: int, tp_size: int, loss: str, gpu_gib: float, beside: Model | None
) -> float:
    """The most tokens that are predicted to fit, 0 where none do."""

    def fits(tokens: int) -> bool:
        size = Size(tokens, vocab, tp_size, loss)
        needed = Estimate(model(size).peak_gib.value, 0.0)
        return verdict(size, needed, free_gib(gpu_gib, size, beside)) == "fits"

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high > low + max(1, low // 500):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def draw(gather: VariantModel, sharded: VariantModel | None, cells: Sequence[Cell], loss: str) -> Figure:
    """A panel for each GPU and each model beside the loss: lines predicted, marks measured."""
    beside: list[Model | None] = [None, *MODELS.values()]
    figure = style.new_figure(12.5, 7)
    grid = figure.subplots(len(GPU_MEMORY_GIB), len(beside), sharex=True, sharey=True)
    for line, gpu_gib in zip(grid, GPU_MEMORY_GIB, strict=True):
        for axes, model in zip(line, beside, strict=True):
            for variant, colour in ((gather, style.colour(1)), (sharded, style.colour(0))):
                if variant is not None:
                    _lines(axes, variant, colour, loss, gpu_gib, model)
            _marks(
                axes, [cell for cell in cells if cell.head == gather.head and cell.size.loss == loss], gpu_gib, model
            )
            title = f"beside a model of {model.name} on {model.gpus} GPUs" if model else "the loss alone"
            axes.set_title(f"{gpu_gib:g} GB GPU, {title}", fontsize=8)
    for axes in grid[-1]:
        axes.set_xlabel("vocab")
    for axes in grid[:, 0]:
        axes.set_ylabel("tokens per replica")
    axes = grid[0][0]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_ylim(LEAST, MOST)
    axes.set_xticks(VOCABS, [f"{vocab // 1024}k" for vocab in VOCABS])
    axes.set_yticks([2**power for power in range(9, 21, 2)], ["512", "2k", "8k", "32k", "128k", "512k"])
    axes.minorticks_off()
    handles = {
        text: handle for each in grid.flat for handle, text in zip(*each.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(f"Above its line a variant runs out of memory ({loss}, predicted); marks: measured", fontsize=9)
    return figure


def _lines(axes: Axes, variant: VariantModel, colour: str, loss: str, gpu_gib: float, beside: Model | None) -> None:
    for tp_size in TP_SIZES:
        limits = [most_tokens(variant, vocab, tp_size, loss, gpu_gib, beside) for vocab in VOCABS]
        axes.plot(VOCABS, limits, _STYLES[tp_size], color=colour, label=f"{variant.head} tp {tp_size}, predicted")


def _marks(axes: Axes, cells: Sequence[Cell], gpu_gib: float, beside: Model | None) -> None:
    """Measured cells: whether what they were measured to need fits here. Ranks side by side, for they share a vocab."""
    for cell in cells:
        free = free_gib(gpu_gib, cell.size, beside)
        fits = cell.peak_gib is not None and cell.size.inputs_gib + cell.peak_gib <= free
        if cell.status == "oom" and beside is None and gpu_gib == max(GPU_MEMORY_GIB):
            fits = False
        elif cell.peak_gib is None:
            continue  # it ran out of memory on a GPU of its own: that says nothing of this one
        axes.plot(
            cell.size.vocab * 1.05 ** (TP_SIZES.index(cell.size.tp_size) if cell.size.tp_size in TP_SIZES else 0),
            cell.size.tokens,
            "o" if fits else "X",
            color=style.ink() if fits else style.colour(5), markersize=4 if fits else 6, linestyle="",
            label=f"{cell.head}, measured: {'fits' if fits else 'out of memory'}",
        )  # fmt: skip
