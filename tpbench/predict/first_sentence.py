"""The first sentence of an answer: which variant to use."""

from __future__ import annotations

from collections.abc import Sequence

from tpbench.predict.estimate import Estimate
from tpbench.predict.model import Prediction
from tpbench.report.analysis.metrics import number
from tpbench.workloads.cost_model import Question

_FEW_TIMES = 10


def first_sentence(
    predictions: Sequence[Prediction], question: Question | None, free: float, *, filtered: bool = False
) -> str:
    """Return the answer to the workload's question, or without one the fastest variant that fits.

    `free`: memory that the operation may use, inputs included, in GiB. If the variants were `filtered`, the answer
    claims nothing about others.
    """
    asked = next((each for each in predictions if question and each.label == question.variant), None)
    others = [each for each in predictions if each is not asked]
    fitting = [each for each in others if each.memory_outcome(free) == "fits"]
    best = min(fitting, key=_order, default=None)
    if asked is None or question is None:
        return _fastest(fitting, best, others, free, filtered)
    fits = asked.memory_outcome(free)
    memory = f"{question.subject} takes {number(asked.peak_gib.value)} GiB"
    if fits != "fits":
        word = "does not fit" if fits == "OOM" else "may not fit"
        none = "" if filtered else ", and no other variant with enough rows surely fits"
        instead = f": use {best.label}, which does" if best else none
        return f"{memory} and {word} into {number(free)} GiB{_because(asked, free)}{instead}"
    if best is None:
        none = "" if filtered else "; no other variant with enough rows surely does"
        return f"{memory} and fits into {number(free)} GiB{none}"
    return f"{memory} {_against(asked, best, question)}"


def _because(prediction: Prediction, free: float) -> str:
    reason = prediction.memory_reason(free)
    return f" ({reason})" if reason else ""


def _known(estimate: Estimate | None) -> bool:
    return estimate is not None and estimate.known


def _order(prediction: Prediction) -> tuple[bool, float]:
    """Return a key that sorts known device times, then known wall times, then the memory of the others."""
    for estimate in (prediction.device_ms, prediction.time_ms):
        if estimate is not None and estimate.known:
            return False, estimate.value
    return True, float(f"{prediction.peak_gib.value:.2g}")


def _against(asked: Prediction, best: Prediction, question: Question) -> str:
    clock = next((clock for clock in ("device_ms", "time_ms") if _known(getattr(asked, clock))), "time_ms")
    mine, other = getattr(asked, clock), getattr(best, clock)
    if not (_known(mine) and _known(other)):
        smaller = f"{best.label} takes {number(best.peak_gib.value)} GiB"
        return f"and fits, {smaller}: their times on this GPU are not known well enough to compare"
    times = mine.value / other.value
    shown = f"{times:.2g}" if times < _FEW_TIMES else f"{times:.0f}"
    by = "device time" if clock == "device_ms" else "wall time"
    if mine.low > other.high:
        return f"and {shown} times as long as {best.label} ({by}): do not {question.action}"
    if mine.high < other.low:
        return f"and {shown} times as long as {best.label} ({by}): {question.action}"
    return f"and about as long as {best.label} ({shown} times by {by}, within the error): memory decides"


def _fastest(
    fitting: Sequence[Prediction],
    best: Prediction | None,
    all_of_them: Sequence[Prediction],
    free: float,
    filtered: bool,
) -> str:
    if best is None:
        smallest = min(all_of_them, key=lambda each: each.peak_gib.value)
        return (
            f"No {'chosen ' if filtered else ''}variant surely fits into {number(free)} GiB: the smallest, "
            f"{smallest.label}, takes {number(smallest.needed_gib)} GiB{_because(smallest, free)}"
        )
    memory = f"takes {number(best.peak_gib.value)} GiB and fits"
    unknown, value = _order(best)
    if unknown:
        return f"{best.label} {memory}; its time on this GPU is not known well enough"
    alone = "" if len(fitting) == 1 else f", the fastest of {len(fitting)} that fit"
    return f"{best.label} {memory}, in {number(value)} ms{alone}"
