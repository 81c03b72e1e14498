"""Measured cells, each predicted from the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from tpbench.predict.cells import MeasuredCell, MeasuredCells
from tpbench.predict.memory import free_gib
from tpbench.predict.model import QUANTITIES, VariantModel
from tpbench.predict.render import aligned_lines
from tpbench.report.analysis.metrics import number

AIMS = {"time_ms": 0.10, "device_ms": 0.10, "peak_gib": 0.03}
_NAMES = {"time_ms": "wall time", "device_ms": "device time", "peak_gib": "peak memory"}


def validation(models: Mapping[str, VariantModel], measured: MeasuredCells) -> tuple[str, bool]:
    """Return a table of each variant's median error on left-out cells, and true if the errors of all variants together
    reach the aims."""
    grid = [["variant", "cells", *(f"{_NAMES[name]}, median error" for name in QUANTITIES)]]
    for label, model in models.items():
        grid.append([label, str(len(model.cells)), *(_median(model.errors[name]) for name in QUANTITIES)])
    pooled = {name: [error for model in models.values() for error in model.errors[name]] for name in QUANTITIES}
    grid.append(["all", str(sum(len(model.cells) for model in models.values())), *map(_median, pooled.values())])
    grid.append(["aim: at most", "", *(f"{AIMS[name]:.0%}" for name in QUANTITIES)])
    reached = all(not errors or np.median(errors) <= AIMS[name] for name, errors in pooled.items())
    lines = [
        f"each cell measured on {measured.gpu} predicted from the others",
        *aligned_lines(grid),
        *_memory_validation(models),
        "the aims are reached" if reached else "the aims are not reached",
    ]
    return "\n".join(lines) + "\n", reached


def _memory_validation(models: Mapping[str, VariantModel]) -> list[str]:
    """Return a count of the cells that ran out of memory and were predicted to, and the others, one on each line."""
    failed = [(model, cell) for model in models.values() for cell in model.ran_out]
    if not failed:
        return ["no cell ran out of memory, so no row checks that prediction"]
    lines = []
    for model, cell in failed:
        word = _predicted_memory(model, cell)
        if not word.startswith("OOM"):
            lines.append(f"  {model.label}, {cell.size}: predicted {word}")
    predicted = len(failed) - len(lines)
    return [
        f"{predicted} of {len(failed)} cells that ran out of memory are predicted to from the others (no aim)",
        *lines,
    ]


def _predicted_memory(model: VariantModel, cell: MeasuredCell) -> str:
    """Return the predicted memory outcome of a cell that ran out of memory, as if it was not measured."""
    if cell.size.kind not in model.fits["peak_gib"].kinds:
        return "unknown"
    others = replace(model, ran_out=tuple(each for each in model.ran_out if each.size != cell.size))
    predicted, free = others(cell.size), free_gib(cell.memory_limit_gib or 0.0, cell.size)
    return f"{predicted.memory_outcome(free)}, {number(predicted.needed_gib)} GiB of {number(free)} GiB"


def _median(errors: Sequence[float]) -> str:
    return f"{np.median(errors):.1%}" if errors else "-"
