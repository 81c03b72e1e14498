"""Predictions as text or JSON. The text begins with a sentence that says which variant to use."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tpbench.predict.model import ERROR_BAR_SHARE, LARGEST_ERROR, TIMES, Estimate, Prediction
from tpbench.predict.target import RESERVE_GIB, Target
from tpbench.report.analysis.metrics import number, ratio_text
from tpbench.tables import MISSING, aligned_lines
from tpbench.workloads.entropy_loss.cost_model import LossSize

UNKNOWN = "unknown"
"""Text of a number whose error bar is too wide, with that error, and of one that the rows do not determine."""

GATHER = "pytorch_gather"
"""The variant that the first sentence is about, if it was measured."""


@dataclass(frozen=True)
class Answer:
    """The predictions of all variants for one problem."""

    size: LossSize
    predictions: Sequence[Prediction]
    target: Target

    @property
    def first_sentence(self) -> str:
        """The advice to gather or not, or without `GATHER` the fastest variant that fits, without a full stop."""
        free = self.target.free_gib
        asked = next((each for each in self.predictions if each.label == GATHER), None)
        others = [each for each in self.predictions if each is not asked]
        fitting = sorted((each for each in others if each.memory(free)[0] == "fits"), key=_order)
        if asked is None or not asked.peak_gib.known:
            return _fastest(fitting, others, free)
        memory, outcome = f"The gather takes {number(asked.peak_gib.value)} GiB", asked.memory(free)[0]
        if outcome != "fits":
            instead = f": use {fitting[0].label}, which does" if fitting else ""
            return f"{memory} and {'does' if outcome == 'OOM' else 'may'} not fit into {number(free)} GiB{instead}"
        if not fitting:
            return f"{memory} and fits into {number(free)} GiB; no other predicted variant surely does"
        best = fitting[0]
        pairs = {"device time": (asked.device_ms, best.device_ms), "wall time": (asked.time_ms, best.time_ms)}
        for by, (mine, other) in pairs.items():
            if mine and other and mine.known and other.known:
                times = f"{memory} and {ratio_text(mine.value / other.value).rstrip('x')} times as long as {best.label}"
                if mine.low <= other.high and other.low <= mine.high:
                    return f"{times} ({by}), within the error: memory decides"
                return f"{times} ({by}): {'' if mine.high < other.low else 'do not '}gather"
        smaller = f"{best.label} takes {number(best.peak_gib.value)} GiB"
        return f"{memory} and fits, {smaller}: their times on this GPU are not known well enough to compare"


def text(answers: Sequence[Answer]) -> str:
    """Return the first sentence on each problem, and then for each a table with one line for each variant."""
    sizes = [f"{answer.size}: " if len(answers) > 1 else "" for answer in answers]
    sentences = [f"{size}{answer.first_sentence}." for size, answer in zip(sizes, answers, strict=True)]
    return "\n".join([*sentences, "", *map(_table, answers)])


def _table(answer: Answer) -> str:
    size, target, free = answer.size, answer.target, answer.target.free_gib
    quantities = ("wall time", "device time", "communication", "sent by a rank", "extra peak memory")
    columns = ["variant", *quantities, f"in {number(free)} GiB"]
    rows, beyond, reasons = [], dict[str, float](), []
    for prediction in answer.predictions:
        sent, (outcome, reason) = prediction.bytes_communicated, prediction.memory(free)
        rows.append([
            prediction.label, _text(prediction.time_ms, "ms"), _text(prediction.device_ms, "ms"),
            _text(prediction.communication_ms, "ms"), UNKNOWN if sent is None else f"{number(sent / 2**20)} MiB",
            _text(prediction.peak_gib, "GiB"), outcome,
        ])  # fmt: skip
        if any(time is None or time.known for time in (prediction.time_ms, prediction.device_ms)):
            beyond |= {name: max(times, beyond.get(name, times)) for name, times in prediction.beyond.items()}
        reasons += [f"{prediction.label}: {reason}"] if reason else []
    factors = [f"{name}={getattr(size, name)} {times:.3g} times" for name, times in beyond.items()]
    notes = [
        target.speed_text(),
        f"memory: {number(target.memory_gib)} GiB of a GPU - {RESERVE_GIB:g} GiB reserve for CUDA, NCCL and "
        f"fragments = {number(free)} GiB; inputs take {number(size.inputs_gib)} GiB of it",
        f"extrapolates beyond what was measured, at most: {', '.join(factors)}" if factors else None,
        f"+-: {ERROR_BAR_SHARE:.0%} of the measured cells were missed by less when left out of the fit; the error "
        f"grows with each doubling beyond what was measured. {UNKNOWN}: the measured cells do not determine it, or "
        f"only within more than {LARGEST_ERROR:.0%}, so measure a cell of about that size",
        *reasons,
    ]
    cells = sum(prediction.cells for prediction in answer.predictions)
    heading = f"{size}: predicted from {cells} cells measured on {target.measured_on}"
    return "\n".join([heading, *aligned_lines(columns, rows), *filter(None, notes)]) + "\n"


def _text(estimate: Estimate | None, unit: str) -> str:
    """Return an estimate as text. None: it is withheld."""
    if estimate is None:
        return MISSING
    if not math.isfinite(estimate.error):
        return UNKNOWN
    error = f"+-{estimate.error:.0%}"
    return f"{number(estimate.value)} {unit} {error}" if estimate.known else f"{UNKNOWN} ({error})"


def as_json(answers: Sequence[Answer]) -> str:
    """Return the same as JSON: an object for one problem, a list for several."""
    objects = [_json_object(answer) for answer in answers]
    return json.dumps(objects[0] if len(objects) == 1 else objects, indent=2) + "\n"


def _json_object(answer: Answer) -> dict[str, object]:
    size, target, variants = answer.size, answer.target, {}
    for prediction in answer.predictions:
        outcome, reason = prediction.memory(target.free_gib)
        estimates = {name: getattr(prediction, name) for name in (*TIMES, "communication_ms", "peak_gib")}
        variants[prediction.label] = {
            **{name: estimate and estimate.as_object() for name, estimate in estimates.items()},
            "bytes_communicated": prediction.bytes_communicated,
            "memory": outcome,
            "memory_reason": reason,
            "beyond": prediction.beyond,
        }
    return {
        "verdict": answer.first_sentence, "gpu": target.measured_on, "same_gpu": target.slowdown == 1,
        "slowdown": target.slowdown, "gpu_memory_gib": target.memory_gib, "reserve_gib": RESERVE_GIB,
        "free_gib": target.free_gib, "inputs_gib": size.inputs_gib, **asdict(size), "variants": variants,
    }  # fmt: skip


def _order(prediction: Prediction) -> tuple[bool, float]:
    """Return a key that sorts known device times, then known wall times, then the memory of the others."""
    for estimate in (prediction.device_ms, prediction.time_ms):
        if estimate is not None and estimate.known:
            return False, estimate.value
    return True, float(f"{prediction.peak_gib.value:.2g}")


def _fastest(fitting: Sequence[Prediction], others: Sequence[Prediction], free: float) -> str:
    """Return a sentence on the fastest of the variants that fit, or without one on the smallest of the others."""
    if not fitting:
        known = [prediction for prediction in others if prediction.peak_gib.known]
        if not known:
            return "No memory is known well enough: measure more sizes, or name more rows with --rows"
        smallest = min(known, key=lambda prediction: prediction.needed_gib)
        needed = f"{smallest.label}, takes {number(smallest.needed_gib)} GiB with its inputs"
        return f"No variant surely fits into {number(free)} GiB: the smallest, {needed}"
    best, (unknown, value) = fitting[0], _order(fitting[0])
    speed = "its time on this GPU is not known well enough" if unknown else f"it takes {number(value)} ms"
    alone = "" if len(fitting) == 1 or unknown else f", the fastest of {len(fitting)} that fit"
    return f"{best.label} takes {number(best.peak_gib.value)} GiB and fits; {speed}{alone}"
