"""Predictions as text or JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tpbench.predict.estimate import LARGEST_ERROR, Estimate
from tpbench.predict.first_sentence import first_sentence
from tpbench.predict.memory import RESERVE_GIB
from tpbench.predict.model import ERROR_BAR_SHARE, Prediction, VariantModel, extrapolation_factors
from tpbench.predict.target import Target
from tpbench.report.analysis.metrics import number
from tpbench.tables import MISSING, Document, Table, as_text
from tpbench.workloads.cost_model import ProblemSize, Question

UNKNOWN = "unknown"
"""Text of a number whose error bar is too wide, with that error, and of communication that the rows do not tell."""


@dataclass(frozen=True)
class Answer:
    """The predictions of all variants for one problem."""

    size: Any
    """A `ProblemSize`."""
    predictions: Sequence[Prediction]
    models: Mapping[str, VariantModel]
    target: Target
    question: Question | None = None
    filtered: bool = False
    """True if the user chose the variants, so that others are not compared."""

    @property
    def free_gib(self) -> float:
        """Memory of the operation, inputs included."""
        return self.target.free_gib(self.size)

    @property
    def first_sentence(self) -> str:
        """The answer in one sentence, without a full stop."""
        return first_sentence(self.predictions, self.question, self.free_gib, filtered=self.filtered)


def text(answers: Sequence[Answer]) -> str:
    """Return the first sentence on each problem, and then for each a table with one line for each variant."""
    if len(answers) == 1:
        return f"{answers[0].first_sentence}.\n\n{_table(answers[0])}"
    sentences = [f"{answer.size}: {answer.first_sentence}." for answer in answers]
    return "\n".join([*sentences, "", *map(_table, answers)])


def _table(answer: Answer) -> str:
    size, free, gpu = answer.size, answer.free_gib, answer.target.measured_on
    columns = [
        "variant",
        "wall time",
        "device time",
        "communication",
        "sent by a rank",
        "extra peak memory",
        f"in {number(free)} GiB",
    ]
    grid = [columns]
    for each in answer.predictions:
        grid.append([
            each.label, _with_error(each.time_ms, "ms"), _with_error(each.device_ms, "ms"),
            _communication(each, answer.target),
            UNKNOWN if each.bytes_communicated is None else f"{number(each.bytes_communicated / 2**20)} MiB",
            _with_error(each.peak_gib, "GiB"), each.memory_outcome(free),
        ])  # fmt: skip
    cells = sum(len(answer.models[each.label].cells) for each in answer.predictions)
    notes = [
        answer.target.speed_text(),
        answer.target.memory_text(size),
        extrapolation([answer.models[each.label] for each in answer.predictions], size),
        f"+-: {ERROR_BAR_SHARE:.0%} of the measured cells were missed by less when left out of the fit; the error "
        f"grows with each doubling beyond what was measured. {UNKNOWN}: more than {LARGEST_ERROR:.0%}, so measure a "
        "cell of about that size",
        _unknown_communication(answer),
        *(f"{each.label}: {reason}" for each in answer.predictions if (reason := each.memory_reason(free))),
    ]
    lines = [f"{size}: predicted from {cells} cells measured on {gpu}", *aligned_lines(grid), *filter(None, notes)]
    return "\n".join(lines) + "\n"


def _communication(prediction: Prediction, target: Target) -> str:
    if prediction.communication_ms is None:
        return MISSING if target.slowdown is None else UNKNOWN
    return f"{number(prediction.communication_ms)} ms"


def _unknown_communication(answer: Answer) -> str | None:
    if answer.target.slowdown is None or all(each.communication_ms is not None for each in answer.predictions):
        return None
    return f"communication is {UNKNOWN} if the rows of a variant do not tell its time apart from the rest"


def extrapolation(models: Sequence[VariantModel], size: ProblemSize) -> str | None:
    """Return one sentence about the fields of the size that lie outside the measured range, or None."""
    factors: dict[str, list[float]] = {}
    for model in models:
        for name, times in extrapolation_factors(model.cells, size).items():
            factors.setdefault(name, []).append(times)
    if not factors:
        return None
    parts = []
    for name, all_times in factors.items():
        low, high = f"{min(all_times):.3g}", f"{max(all_times):.3g}"
        of = "all variants" if len(all_times) == len(models) else f"{len(all_times)} of {len(models)} variants"
        parts.append(f"{name}={getattr(size, name)} {low if low == high else f'{low} to {high}'} times ({of})")
    return f"extrapolates beyond what was measured: {', '.join(parts)}"


def as_json(answers: Sequence[Answer]) -> str:
    """Return the same as JSON: an object for one problem, a list for several."""
    objects = [_answer_object(answer) for answer in answers]
    return json.dumps(objects[0] if len(objects) == 1 else objects, indent=2) + "\n"


def _estimate_object(estimate: Estimate | None) -> dict[str, object] | None:
    if estimate is None:
        return None
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high, "known": estimate.known}


def _answer_object(answer: Answer) -> dict[str, object]:
    size, target = answer.size, answer.target
    variants = {
        each.label: {
            "time_ms": _estimate_object(each.time_ms), "device_ms": _estimate_object(each.device_ms),
            "communication_ms": each.communication_ms, "bytes_communicated": each.bytes_communicated,
            "peak_gib": _estimate_object(each.peak_gib),
            "memory": each.memory_outcome(answer.free_gib), "memory_reason": each.memory_reason(answer.free_gib),
            "beyond": extrapolation_factors(answer.models[each.label].cells, size),
        }
        for each in answer.predictions
    }  # fmt: skip
    problem: dict[str, object] = asdict(size)
    return {
        "verdict": answer.first_sentence, "gpu": target.measured_on, "same_gpu": target.is_measured,
        "slowdown": target.slowdown, "gpu_memory_gib": target.memory_gib, "reserve_gib": RESERVE_GIB,
        "beside": target.beside.name if target.beside else None,
        "free_gib": answer.free_gib, "inputs_gib": size.inputs_gib, **problem, "variants": variants,
    }  # fmt: skip


def _with_error(estimate: Estimate | None, unit: str) -> str:
    if estimate is None:
        return MISSING
    error = f"+-{estimate.error:.0%}"
    return f"{number(estimate.value)} {unit} {error}" if estimate.known else f"{UNKNOWN} ({error})"


def aligned_lines(grid: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, of which the first has the names of the columns."""
    return as_text(Document([Table("", grid[0], grid[1:])])).plain.splitlines()
