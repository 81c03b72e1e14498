"""`tpbench predict`: the predicted time and memory of a problem that was not measured."""

import argparse
import itertools
import math
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields
from typing import Any

import pandas as pd

from tpbench.job import Job
from tpbench.measure.machine import KNOWN_GPUS
from tpbench.predict.answer import Answer, document
from tpbench.predict.cells import MeasuredCells, measured
from tpbench.predict.model import (
    COUNTED,
    ERROR_BAR_SHARE,
    LARGEST_ERROR,
    TIMES,
    Prediction,
    VariantModel,
    calibrated_errors,
    models,
)
from tpbench.predict.target import NODE_GPUS, Target, find_target
from tpbench.report import command_line
from tpbench.settings import JobError
from tpbench.suggestions import unknown
from tpbench.tables import MISSING, Document, Table
from tpbench.workloads.entropy_loss import WORKLOAD, EntropyLoss
from tpbench.workloads.entropy_loss.cost_model import LossSize, sends_parts


def main(arguments: Sequence[str]) -> int:
    """Run the command. Return 1 if a validation misses its aims. Raises JobError for what cannot be answered."""
    options = _parser().parse_args(arguments)
    form = command_line.output_format(options, tuple(command_line.TABLES))
    if options.workload not in (None, WORKLOAD.name):
        raise JobError(
            f"predict knows only {WORKLOAD.name}, a loss of given logits. What {options.workload} needs of memory, and "
            "how long similar cells took, says a dry run: python -m tpbench -m variant=NAME shape=NAME dry_run=true"
        )
    cells = measured(command_line.read_rows(options.rows), options.gpu)
    fitted = models(cells)
    if not fitted:
        raise JobError(f"no variant was measured in enough cells on {cells.gpu} to predict from")
    if options.validate:
        content, reached = validation(_chosen(fitted, options), cells.gpu)
    else:
        content, reached = document(_answers(cells, fitted, options)), True
    command_line.write(content, form, options.output)
    return 0 if reached else 1


def _parser() -> argparse.ArgumentParser:
    parser = command_line.ReportParser(
        prog="tpbench predict",
        description=f"Time, communication and memory of any problem ({WORKLOAD.summary}), from a model fitted to rows.",
        epilog="Sizes may be lists and have a unit: --tp 4,8 --vocab 128k (k is 1024).",
    )
    for field in fields(LossSize):
        _add_size(parser, field)
    add = parser.add_argument
    memory = "memory of a GPU: an 80 GB one has 80 GiB, a 141 GB one 140 (that of the rows' GPU)"
    add("--gpu-memory", type=positive_number, metavar="GIB", help=memory)
    bandwidth = "copy bandwidth of a GPU, as in the column copy_gb_per_s: scales times (that of the rows' GPU)"
    add("--bandwidth", type=positive_number, metavar="GB_PER_S", help=bandwidth)
    add("--workload", metavar="NAME", help=f"only {WORKLOAD.name}; for others see dry_run=true")
    add("--variant", metavar="A,B", help="only these variants")
    add("--rows", nargs="+", default=["outputs"], metavar="PLACE", help="rows to fit to (outputs)")
    gpu = f"your GPU: one with rows, or {', '.join(KNOWN_GPUS)} (the one with most rows)"
    add("--gpu", metavar="NAME", help=gpu)
    validate = "predict measured sizes and tp sizes from the others, and show how many error bars hold"
    add("--validate", action="store_true", help=validate)
    command_line.add_output(parser, tuple(command_line.TABLES))
    return parser


def _add_size(parser: argparse.ArgumentParser, size: Field[Any]) -> None:
    """Add the option for one field of the size. Its help and choices are those of the job's field."""
    owner = Job if size.name == "tp_size" else EntropyLoss
    help_text = next(field.metadata["help"] for field in fields(owner) if field.name == size.name)
    choices = typing.get_args(typing.get_type_hints(owner)[size.name])
    flag = f"--{size.name.removesuffix('_size')}"
    kind: dict[str, Any] = {"choices": choices} if choices else {"type": whole_numbers, "metavar": flag[2:].upper()}
    parser.add_argument(flag, dest=size.name, default=size.default, help=f"{help_text} ({size.default})", **kind)


def positive_number(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be above 0")
    return value


def _answers(cells: MeasuredCells, fitted: Mapping[str, VariantModel], options: argparse.Namespace) -> list[Answer]:
    target = find_target(cells, options.gpu, options.gpu_memory, options.bandwidth)
    names = [field.name for field in fields(LossSize)]
    given = [value if isinstance(value := getattr(options, name), list) else [value] for name in names]
    answers = []
    for numbers in itertools.product(*given):
        values = dict(zip(names, numbers, strict=True))
        size = LossSize(**values)
        problem = EntropyLoss(**{name: value for name, value in values.items() if name != "tp_size"})
        if complaints := problem.check(size.tp_size, 1):
            raise JobError("\n".join(complaints))
        measured_kinds = {label: {cell.size.kind for cell in model.cells} for label, model in fitted.items()}
        able = {label: model for label, model in fitted.items() if size.kind in measured_kinds[label]}
        if not able:
            raise JobError(f"{size.kind} was not measured on {cells.gpu}")
        predictions = []
        for label, model in _chosen(able, options).items():
            refusal = _refusal(label, problem, size.tp_size, target)
            if refusal and options.variant:
                raise JobError(f"{label} cannot run {size}: {refusal}")
            if not refusal:
                predictions.append(model(size, target.slowdown))
        unknown = [] if options.variant else _without_time(predictions, problem, size.tp_size, target)
        answers.append(Answer(size, predictions, target, unknown))
    return answers


def _refusal(label: str, problem: EntropyLoss, tp_size: int, target: Target) -> str | None:
    """Return why a variant cannot run a problem on the GPUs in question, or None if it can."""
    if tp_size > 1 and (tp_size > NODE_GPUS or not target.peers) and sends_parts(label, problem.loss):
        return f"its exchange needs GPUs that reach each other's memory: at most {NODE_GPUS} of one node, with NVLink"
    return WORKLOAD.variants[label.split()[0]].unsupported_reason(problem, tp_size)


def _without_time(predictions: Sequence[Prediction], problem: EntropyLoss, tp_size: int, target: Target) -> list[str]:
    """Return the variants that can run the problem and of which no time is known."""
    known = {
        one.label.split()[0] for one in predictions if any(time and time.known for time in (one.time_ms, one.device_ms))
    }
    able = [name for name in WORKLOAD.variants if _refusal(name, problem, tp_size, target) is None]
    return [name for name in able if name not in known]


def _chosen(able: Mapping[str, VariantModel], options: argparse.Namespace) -> Mapping[str, VariantModel]:
    """Return the models that `--variant` names, or all. Raises JobError for a variant without a model."""
    if options.variant is None:
        return able
    names = options.variant.split(",")
    for name in names:
        if name not in able:
            raise JobError(unknown("variant with enough cells", name, able))
    return {name: able[name] for name in names}


def whole_numbers(text: str) -> list[int]:
    """Return the numbers, separated by commas. `128k` is 128 * 1024."""
    numbers = [re.fullmatch(r"\s*([1-9][0-9]*)([kKmM]?)\s*", part) for part in text.split(",")]
    if not all(numbers):
        raise argparse.ArgumentTypeError(
            f"{text or 'nothing'} is no whole number of at least 1: write 131072 or 128k, and 4,8 for several"
        )
    return [int(number[1]) * 1024 ** " km".index(number[2].lower() or " ") for number in numbers if number]


LEAST_COVERAGE, LEAST_KNOWN, LARGEST_BAR, LARGEST_COUNT_ERROR = 0.85, 0.8, 0.15, 0.03
"""Aims of the validation: the share of true times within their error bars, the share of cells inside the measured range
that have a number, the median error bar of these, and the median error of memory and sent bytes of each variant."""


def validation(fitted: Mapping[str, VariantModel], gpu: str) -> tuple[Document, bool]:
    """Return tables of how well cells are predicted that were left out of the fit, and true if they reach the aims."""
    columns = ("left out", "times", "inside", "predicted", "within +-", "of inside", "median +-")
    rows, bars, reached = [], [], True
    for axis, left_out in (("size", "a size"), ("tp", "a number of ranks")):
        lines = pd.concat([_times(fitted, model, axis) for model in fitted.values()]).dropna(subset="error")
        inside, known = lines[lines["inside"]], lines[lines["bar"] <= LARGEST_ERROR]
        within, of_inside = (known["error"] <= known["bar"]).mean(), (inside["bar"] <= LARGEST_ERROR).mean()
        reached &= not (within < LEAST_COVERAGE or of_inside < LEAST_KNOWN)
        bars.append(known.loc[known["inside"], "bar"])
        shares = (within, of_inside, bars[-1].median())
        rows.append([left_out, *(str(len(part)) for part in (lines, inside, known)), *map(_share, shares)])
    reached &= not pd.concat(bars).median() > LARGEST_BAR
    rows.append(["aim", "", "", "", *map(_share, (LEAST_COVERAGE, LEAST_KNOWN, LARGEST_BAR))])
    counted = []
    for label, model in fitted.items():
        medians = model.left_out[[*COUNTED]].median()
        missed = (medians > LARGEST_COUNT_ERROR).any()
        reached &= not missed
        counted.append([label, *map(_share, medians), "missed" if missed else ""])
    tables = [
        Table("", columns, rows, keys=1),
        Table("median errors of counts", ("variant", "peak memory", "sent", ""), counted, keys=1),
    ]
    caption = (
        f"wall and device times on {gpu}, predicted from the other cells of their variant; inside: cells of their loss "
        f"have less and more of each size; +- promises {ERROR_BAR_SHARE:.0%}. Without a cell of its variant, loss and "
        "GPU, a time is not predicted"
    )
    return Document(tables, caption, [f"the aims are {'' if reached else 'not '}reached"]), bool(reached)


def _times(fitted: Mapping[str, VariantModel], model: VariantModel, axis: str) -> pd.DataFrame:
    """Return the error of each time that was left out along an axis, and the error bar that others give it."""
    others = [other.left_out for label, other in fitted.items() if label != model.label]
    lines = []
    for _, group in model.left_out[model.left_out["axis"] == axis].groupby("group"):
        own = model.left_out.drop(group.index)
        errors = calibrated_errors(own, [own, *others])
        for line in group.to_dict("records"):
            inside = line["kind"] in ("size", "ranks")
            for name in TIMES:
                bar = errors.get((line["kind"], name), math.inf) * line["stretch"]
                lines.append({"error": line[name], "bar": bar, "inside": inside})
    return pd.DataFrame(lines, columns=["error", "bar", "inside"])


def _share(share: float) -> str:
    return MISSING if pd.isna(share) else f"{share:.1%}"
