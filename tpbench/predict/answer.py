"""Predictions as tables. They begin with a sentence that says which variant to use."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tpbench.predict.model import ERROR_BAR_SHARE, LARGEST_ERROR, TIMES, Estimate, Prediction
from tpbench.predict.target import RESERVE_GIB, Target
from tpbench.report.analysis.metrics import amount, number, ratio_text
from tpbench.settings import spelled
from tpbench.tables import MISSING, Document, Table, TableCell
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
    unknown: Sequence[str] = ()
    """Variants that can run the problem and of which no time is known."""

    @property
    def first_sentence(self) -> str:
        """What no time is known of, and then the advice, without a full stop."""
        unknown = f"No time is known of {', '.join(self.unknown)}. " if self.unknown and self.target.slowdown else ""
        return unknown + self.advice

    @property
    def advice(self) -> str:
        """The advice to gather or not, or without `GATHER` the fastest variant that fits, without a full stop."""
        free = self.target.free_gib
        asked = next((each for each in self.predictions if each.label == GATHER), None)
        others = [each for each in self.predictions if each is not asked]
        fitting = sorted((each for each in others if each.memory(free)[0] == "fits"), key=_order)
        if asked is None or not asked.peak_gib.known:
            return _fastest(fitting, others, free)
        memory, outcome = f"The gather takes {amount(asked.peak_gib.value, 'GiB')}", asked.memory(free)[0]
        if outcome != "fits":
            instead = f": use {fitting[0].label}, which does" if fitting else ""
            return f"{memory} and {'does' if outcome == 'OOM' else 'may'} not fit into {amount(free, 'GiB')}{instead}"
        if not fitting:
            return f"{memory} and fits into {amount(free, 'GiB')}; no other predicted variant surely does"
        best = fitting[0]
        pairs = {"device time": (asked.device_ms, best.device_ms), "wall time": (asked.time_ms, best.time_ms)}
        for by, (mine, other) in pairs.items():
            if mine and other and mine.known and other.known:
                times = f"{memory} and {ratio_text(mine.value / other.value).rstrip('x')} times as long as {best.label}"
                if mine.low <= other.high and other.low <= mine.high:
                    return f"{times} ({by}), within the error: memory decides"
                return f"{times} ({by}): {'' if mine.high < other.low else 'do not '}gather"
        smaller = f"{best.label} takes {amount(best.peak_gib.value, 'GiB')}"
        return f"{memory} and fits, {smaller}: their times on this GPU are not known well enough to compare"


def document(answers: Sequence[Answer]) -> Document:
    """Return the first sentence on each problem, and then for each a table with one line for each variant."""
    sizes = [f"{answer.size}: " if len(answers) > 1 else "" for answer in answers]
    sentences = [f"{size}{answer.first_sentence}." for size, answer in zip(sizes, answers, strict=True)]
    return Document([*map(_table, answers)], "\n".join(sentences))


def _table(answer: Answer) -> Table:
    size, target, free = answer.size, answer.target, answer.target.free_gib
    rows: list[list[TableCell | str]] = []
    beyond, reasons = dict[str, float](), []
    for prediction in answer.predictions:
        sent, (outcome, reason) = prediction.bytes_communicated, prediction.memory(free)
        rows.append([
            prediction.label,
            *(_cell(getattr(prediction, name), "ms") for name in TIMES),
            TableCell(UNKNOWN) if sent is None else TableCell(f"{number(sent / 2**20)} MiB", sent),
            _cell(prediction.peak_gib, "GiB"),
            TableCell(outcome, note=reason or ""),
        ])  # fmt: skip
        if any(time is None or time.known for time in (prediction.time_ms, prediction.device_ms)):
            beyond |= {name: max(times, beyond.get(name, times)) for name, times in prediction.beyond.items()}
        reasons += [f"{prediction.label}: {reason}"] if reason else []
    factors = [f"{name}={getattr(size, name)} {times:.3g} times" for name, times in beyond.items()]
    notes = [
        target.speed_text(),
        f"memory: {amount(target.memory_gib, 'GiB')} of a GPU - {RESERVE_GIB:g} GiB reserve for CUDA, NCCL and "
        f"fragments = {amount(free, 'GiB')}; inputs take {amount(size.inputs_gib, 'GiB')} of it",
        f"extrapolates beyond what was measured, at most: {', '.join(factors)}" if factors else None,
        f"+-: {ERROR_BAR_SHARE:.0%} of the measured cells were missed by less when left out of the fit; the error "
        f"grows with each doubling beyond what was measured. {UNKNOWN}: the measured cells do not determine it, or "
        f"only within more than {LARGEST_ERROR:.0%}, so measure a cell of about that size",
        *reasons,
    ]
    return Table(
        f"{size}: predicted from {sum(prediction.cells for prediction in answer.predictions)} cells measured on "
        f"{target.measured_on}",
        ("variant", *TIMES, "bytes_communicated", "peak_gib", "memory"),
        rows,
        {"verdict": answer.first_sentence} | {name: spelled(value) for name, value in asdict(size).items()},
        [*filter(None, notes)],
        keys=1,
    )


def _cell(estimate: Estimate | None, unit: str) -> TableCell:
    """Return the cell of an estimate. None: it is withheld."""
    if estimate is None:
        return TableCell(MISSING)
    if not math.isfinite(estimate.error):
        return TableCell(UNKNOWN)
    error = f"+-{estimate.error:.0%}"
    if not estimate.known:
        return TableCell(f"{UNKNOWN} ({error})")
    return TableCell(f"{amount(estimate.value, unit)} {error}", estimate.value, note=error)


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
        needed = f"{smallest.label}, takes {amount(smallest.needed_gib, 'GiB')} with its inputs"
        return f"No variant surely fits into {amount(free, 'GiB')}: the smallest, {needed}"
    best, (unknown, value) = fitting[0], _order(fitting[0])
    speed = "its time on this GPU is not known well enough" if unknown else f"it takes {number(value)} ms"
    alone = "" if len(fitting) == 1 or unknown else f", the fastest of {len(fitting)} that fit"
    return f"{best.label} takes {amount(best.peak_gib.value, 'GiB')} and fits; {speed}{alone}"
