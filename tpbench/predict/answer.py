"""Predictions as tables. They begin with a sentence that says which variant to use."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tpbench.predict.model import COUNTED, ERROR_BAR_SHARE, LARGEST_ERROR, TIMES, Estimate, Prediction
from tpbench.predict.target import RESERVE_GIB, Target
from tpbench.settings import spelled
from tpbench.suggestions import amount, number, ratio_text
from tpbench.tables import MISSING, Document, Table, TableCell
from tpbench.workloads.entropy_loss.cost_model import LossSize

UNKNOWN = "unknown"
"""Text of a number whose error bar is too wide, with that error, and of one that the rows do not determine."""
GATHER = "pytorch_gather"
"""The variant to which the fastest one is compared."""
UNITS = {"time_ms": "ms", "device_ms": "ms", "peak_gib": "GiB", "bytes_communicated": "MiB"}


@dataclass(frozen=True)
class Answer:
    """The predictions of all variants for one problem."""

    size: LossSize
    predictions: Sequence[Prediction]
    target: Target
    unknown: Sequence[str] = ()  # variants that can run the problem and of which no time is known

    @property
    def first_sentence(self) -> str:
        """What no time is known of, and then the fastest variant that fits, beside the gather."""
        unknown = f"No time is known of {', '.join(self.unknown)}. " if self.unknown and self.target.slowdown else ""
        fitting = [one for one in self.predictions if one.memory(self.target.free_gib) == "fits"]
        if not fitting:
            return f"{unknown}No variant surely fits into {amount(self.target.free_gib, 'GiB')}."
        timed = [(*one.time, one) for one in fitting if one.time]
        if not timed:
            smallest = min(fitting, key=lambda one: one.estimates["peak_gib"].value)
            return f"{unknown}{smallest.model.label} takes {_gib(smallest)}, the least; no time is known well enough."
        by, time, best = min(timed, key=lambda item: item[1].value)
        fastest = f"the fastest of {len(fitting)} that fit"
        sentence = f"{best.model.label} takes {number(time.value)} ms ({by}) and {_gib(best)}, {fastest}"
        gather = next((one for one in self.predictions if one.model.label == GATHER), best)
        if gather is not best and gather.estimates["peak_gib"].known:
            sentence += f". The gather takes {_gib(gather)}"
            if (outcome := gather.memory(self.target.free_gib)) != "fits":
                sentence += f": {outcome}"
            elif (other := gather.estimates[by]).known:
                within = ", within the error" if other.low <= time.high else ""
                sentence += f" and {ratio_text(other.value / time.value).rstrip('x')} times as long{within}"
        return f"{unknown}{sentence}."


def _gib(prediction: Prediction) -> str:
    return amount(prediction.estimates["peak_gib"].value, "GiB")


def document(answers: Sequence[Answer]) -> Document:
    """Return the first sentence on each problem, and then for each a table with one line for each variant."""
    sentences = [f"{answer.size}: " * (len(answers) > 1) + answer.first_sentence for answer in answers]
    return Document([*map(_table, answers)], "\n".join(sentences))


def _table(answer: Answer) -> Table:
    size, target, free = answer.size, answer.target, answer.target.free_gib
    names = (*TIMES, *reversed(COUNTED))
    cells = [cell for one in answer.predictions for cell in one.model.cells]
    hosts = ", ".join(sorted({cell.row["host"] for cell in cells}))
    rows: list[list[TableCell | str]] = [
        [one.model.label, *(_cell(one.estimates.get(name), UNITS[name]) for name in names), one.memory(free)]
        for one in answer.predictions
    ]
    notes = [
        target.speed_text(),
        f"memory: {amount(target.memory_gib, 'GiB')} of a GPU - {RESERVE_GIB:g} GiB reserve for CUDA, NCCL and "
        f"fragments = {amount(free, 'GiB')}; inputs take {amount(size.inputs_gib, 'GiB')} of it",
        f"+-: {ERROR_BAR_SHARE:.0%} of the measured cells were missed by less when left out of the fit. The error "
        f"grows with each doubling beyond what was measured. {UNKNOWN}: the measured cells do not determine it, or "
        f"only within more than {LARGEST_ERROR:.0%}, so measure a cell of about that size",
        f"the rows are of {hosts}: on another host, wall times may be off by more than +- says",
    ]
    return Table(
        f"{size}: predicted from {len(cells)} cells measured on {target.measured_on}",
        ("variant", *names, "memory"),
        rows,
        {"verdict": answer.first_sentence} | {name: spelled(value) for name, value in asdict(size).items()},
        [*filter(None, notes)],
        keys=1,
    )


def _cell(estimate: Estimate | None, unit: str) -> TableCell:
    """Return the cell of an estimate. None: it is withheld."""
    if estimate is None or not math.isfinite(estimate.error):
        return TableCell(UNKNOWN if estimate else MISSING)
    error = f"+-{estimate.error:.0%}"
    if not estimate.known:
        return TableCell(f"{UNKNOWN} ({error})")
    value = estimate.value / 2**20 if unit == "MiB" else estimate.value
    return TableCell(f"{amount(value, unit)} {error}", estimate.value, note=error)
