"""Predictions and validations as text or JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import numpy as np

from tpbench.predict.cells import MeasuredCells
from tpbench.predict.memory import memory_verdict
from tpbench.predict.model import QUANTITIES, SHARE, Estimate, Prediction, VariantModel, beyond
from tpbench.report.metric import number
from tpbench.report.writer import aligned
from tpbench.workloads.cost_model import ProblemSize

AIMS = {"time_ms": 0.10, "device_ms": 0.10, "peak_gib": 0.03}
_NAMES = {"time_ms": "wall time", "device_ms": "device time", "peak_gib": "peak memory"}


def text(
    predictions: Sequence[Prediction], models: Mapping[str, VariantModel], size: ProblemSize, free: float, gpu: str
) -> str:
    """Return a table with one line for each variant, and notes on inputs and extrapolation."""
    heads = [
        "variant",
        "wall time",
        "device time",
        "communication",
        "sent by a rank",
        "extra peak memory",
        f"in {number(free)} GiB",
    ]
    grid = [heads]
    for each in predictions:
        grid.append([
            each.head, _with_error(each.time_ms, "ms"), _with_error(each.device_ms, "ms"),
            f"{number(each.communication_ms)} ms", f"{number(each.bytes_communicated / 2**20)} MiB",
            _with_error(each.peak_gib, "GiB"), memory_verdict(size, each.peak_gib, free),
        ])  # fmt: skip
    lines = [
        f"{size}: predicted from {sum(len(models[each.head].cells) for each in predictions)} cells measured on {gpu}",
        *_aligned(grid),
        f"+-: all but {1 - SHARE:.0%} of measured cells were missed by less when left out of the fit, times 1 + the "
        "number of doublings beyond what was measured",
        f"inputs take {number(size.inputs_gib)} GiB besides",
    ]
    for each in predictions:
        for line in extrapolation(models[each.head], size):
            lines.append(f"{each.head}: {line}")
    return "\n".join(lines) + "\n"


def extrapolation(model: VariantModel, size: ProblemSize) -> list[str]:
    """Return a sentence for each field of the size that lies outside the variant's measured range."""
    return [
        f"extrapolates: {name}={getattr(size, name)} is {times:.3g} times beyond what was measured"
        for name, times in beyond(model.cells, size).items()
    ]


def as_json(
    predictions: Sequence[Prediction], models: Mapping[str, VariantModel], size: ProblemSize, free: float, gpu: str
) -> str:
    """Return the same as JSON."""

    def estimate(found: Estimate | None) -> dict[str, float] | None:
        return None if found is None else {"value": found.value, "low": found.low, "high": found.high}

    variants = {
        each.head: {
            "time_ms": estimate(each.time_ms), "device_ms": estimate(each.device_ms),
            "communication_ms": each.communication_ms, "bytes_communicated": each.bytes_communicated,
            "peak_gib": estimate(each.peak_gib), "memory": memory_verdict(size, each.peak_gib, free),
            "beyond": beyond(models[each.head].cells, size),
        }
        for each in predictions
    }  # fmt: skip
    problem: dict[str, object] = asdict(size)  # type: ignore[call-overload]  # a dataclass
    return (
        json.dumps(
            {"gpu": gpu, "free_gib": free, "inputs_gib": size.inputs_gib, **problem, "variants": variants}, indent=2
        )
        + "\n"
    )


def validation(models: Mapping[str, VariantModel], measured: MeasuredCells) -> tuple[str, bool]:
    """Return a table of each variant's median error on left-out cells, and true if the errors of all variants together
    reach the aims."""
    grid = [["variant", "cells", *(f"{_NAMES[name]}, median error" for name in QUANTITIES)]]
    for head, model in models.items():
        grid.append([head, str(len(model.cells)), *(_median(model.errors[name]) for name in QUANTITIES)])
    pooled = {name: [error for model in models.values() for error in model.errors[name]] for name in QUANTITIES}
    grid.append(["all", str(sum(len(model.cells) for model in models.values())), *map(_median, pooled.values())])
    grid.append(["aim: at most", "", *(f"{AIMS[name]:.0%}" for name in QUANTITIES)])
    reached = all(not errors or np.median(errors) <= AIMS[name] for name, errors in pooled.items())
    lines = [
        f"each cell measured on {measured.gpu} predicted from the others",
        *_aligned(grid),
        "the aims are reached" if reached else "the aims are not reached",
    ]
    return "\n".join(lines) + "\n", reached


def _median(errors: Sequence[float]) -> str:
    return f"{np.median(errors):.1%}" if errors else "-"


def _with_error(estimate: Estimate | None, unit: str) -> str:
    return "-" if estimate is None else f"{number(estimate.value)} {unit} +-{estimate.error:.0%}"


def _aligned(grid: Sequence[Sequence[str]]) -> list[str]:
    return [line.plain for line in aligned(grid[0], grid[1:], left=[grid[0][0]])]
