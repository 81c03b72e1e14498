"""`tpbench predict`: the predicted time and memory of a problem that was not measured."""

import argparse
import itertools
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields
from typing import Any

import pandas as pd

from tpbench.job import Job
from tpbench.predict.answer import Answer, document
from tpbench.predict.cells import KNOWN_GPUS, MeasuredCell, MeasuredCells, measured
from tpbench.predict.model import COUNTED, TIMES, VariantModel, leave_out, models
from tpbench.predict.target import find_target
from tpbench.report import command_line
from tpbench.settings import JobError
from tpbench.suggestions import unknown
from tpbench.tables import MISSING, Document, Table
from tpbench.workloads.entropy_loss import WORKLOAD, EntropyLoss
from tpbench.workloads.entropy_loss.cost_model import LossSize


def main(arguments: Sequence[str]) -> int:
    """Run the command. Return 1 if a validation misses its aims. Raises JobError for what cannot be answered."""
    options = _parser().parse_args(arguments)
    form = command_line.output_format(options, tuple(command_line.TABLES))
    cells = measured(command_line.read_rows(options.rows), options.gpu)
    fitted = models(cells)
    if not fitted:
        raise JobError(f"no variant was measured in enough cells on {cells.gpu} to predict from")
    if options.validate:
        content, reached = validation(_chosen(fitted, options), cells)
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
    add("--variant", metavar="A,B", help="only these variants")
    add("--rows", nargs="+", default=["outputs"], metavar="PLACE", help="rows to fit to (outputs)")
    gpu = f"your GPU: one with rows, or {', '.join(KNOWN_GPUS)} (the one with most rows)"
    add("--gpu", metavar="NAME", help=gpu)
    validate = "predict measured cells, tp sizes and the largest sizes from the others, and show the errors"
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
            refusal = WORKLOAD.variants[label.split()[0]].unsupported_reason(problem, size.tp_size)
            if refusal and options.variant:
                raise JobError(f"{label} cannot run {size}: {refusal}")
            if not refusal:
                predictions.append(model(size, target.slowdown))
        answers.append(Answer(size, predictions, target))
    return answers


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


LEFT_OUT = {"one cell": (0.10, 0.03), "all cells of a tp size": (0.25, 0.03), "the largest of a size": (0.25, 0.03)}
"""Cells that are predicted from the others, with the aims: largest median error of the times, and of the counts."""


def validation(models: Mapping[str, VariantModel], measured: MeasuredCells) -> tuple[Document, bool]:
    """Return a table of the median errors on cells that were left out, and true if they reach the aims.

    The times of all variants together must reach them, and the memory and the sent bytes of each variant, because these
    are counted: a variant whose counts are wrong shows only there.
    """
    columns = ["left out", "variant", "predicted", "wall time", "device time", "peak memory", "sent", ""]
    rows, reached = [], True
    for left_out, (of_times, of_counts) in LEFT_OUT.items():
        errors = {label: leave_out(model.cells, _groups(left_out, model.cells)) for label, model in models.items()}
        for label, found in errors.items():
            missed = (found[[*COUNTED]].median() > of_counts).any()
            known = f"{found['device_ms'].count()} of {len(models[label].cells)}"
            rows.append([left_out, label, known, *_medians(found), "missed" if missed else ""])
            reached &= not missed
        pooled = pd.concat(errors.values())
        rows.append([left_out, "all", "", *_medians(pooled), ""])
        rows.append([left_out, "aim: at most", "", *(f"{aim:.0%}" for aim in (*2 * [of_times], *2 * [of_counts])), ""])
        reached &= not (pooled[[*TIMES]].median() > of_times).any()
    caption = (
        f"median errors of cells measured on {measured.gpu} that were predicted from the others (times that the others "
        "do not determine are not predicted)"
    )
    verdict = "the aims are reached" if reached else "the aims are not reached"
    return Document([Table("", columns, rows)], caption, [verdict]), bool(reached)


def _groups(left_out: str, cells: Sequence[MeasuredCell]) -> list[set[Any]]:
    """Return the groups of sizes that are left out together, or none if each size is left out alone."""
    if left_out == "one cell":
        return []
    sizes = {cell.size for cell in cells}
    if left_out == "all cells of a tp size":
        return [{size for size in sizes if size.tp_size == ranks} for ranks in {size.tp_size for size in sizes}]
    names = [name for name, value in vars(next(iter(sizes))).items() if isinstance(value, int) and name != "tp_size"]
    largest = {name: max(getattr(size, name) for size in sizes) for name in names}
    return [{size for size in sizes if getattr(size, name) == largest[name]} for name in names]


def _medians(errors: pd.DataFrame) -> list[str]:
    return [MISSING if pd.isna(median) else f"{median:.1%}" for median in errors.median()]
