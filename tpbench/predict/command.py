"""`scripts/predict.py`: the predicted time and memory of a problem that was not measured."""

from __future__ import annotations

import argparse
import itertools
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from tpbench.job import Job
from tpbench.predict.answer import Answer, as_json, text
from tpbench.predict.cells import MeasuredCell, MeasuredCells, cost_model_of, measured, predictable
from tpbench.predict.memory import ASSUMPTION, MODELS, find_target, free_gib
from tpbench.predict.model import QUANTITIES, VariantModel, leave_out, models, one_by_one
from tpbench.report.analysis.metrics import number
from tpbench.report.command_line import read_rows
from tpbench.settings import JobError
from tpbench.suggestions import unknown
from tpbench.tables import aligned_lines
from tpbench.workloads import Workload, workloads
from tpbench.workloads.cost_model import ProblemSize


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return 1 if a validation misses its aims, and 2 for a question that cannot be answered."""
    try:
        workload = _workload(arguments)
        options = _parser(workload).parse_args(arguments)
        cells = measured(read_rows(options.rows), workload, options.gpu)
        fitted = models(cells, errors=not options.picture)
        if not fitted:
            raise JobError(f"no variant was measured in enough cells on {cells.gpu} to predict from")
        if options.picture:
            _picture(cells, fitted, _sizes(workload, options), options.picture)
            return 0
        if options.validate:
            table, reached = validation(_chosen(fitted, options), cells)
            print(table, end="")
            return 0 if reached else 1
        answers = _answers(cells, fitted, workload, options)
        print(as_json(answers) if options.format == "json" else text(answers), end="")
    except (JobError, OSError) as error:
        print(f"predict: {error}", file=sys.stderr)
        return 2
    return 0


def _workload(arguments: Sequence[str] | None) -> Workload:
    """Return the chosen workload: its cost model says which further options there are. Raises JobError."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--workload", default=next(iter(predictable())))
    name = parser.parse_known_args(arguments)[0].workload
    if name not in workloads():
        raise JobError(unknown("workload", name, workloads()))
    cost_model_of(workloads()[name])
    return workloads()[name]


def _parser(workload: Workload) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="predict.py",
        description=f"Time, communication and memory of any problem ({workload.summary}), from a model fitted to rows.",
        epilog="Sizes may be lists and have a unit: --tp 4,8 --vocab 128k (k is 1024). What a model leaves free is an "
        f"assumption: {ASSUMPTION}.",
    )
    for field in fields(cost_model_of(workload).size):
        _add_size(parser, field, workload)
    parser.add_argument(
        "--gpu-memory",
        type=_positive_float,
        metavar="GIB",
        help="memory of a GPU: an 80 GB one has 80 GiB, a 141 GB one 140 (that of the rows' GPU)",
    )
    parser.add_argument(
        "--bandwidth",
        type=_positive_float,
        metavar="GB_PER_S",
        help="copy bandwidth of a GPU, as in the column copy_gb_per_s: scales times (that of the rows' GPU)",
    )
    parser.add_argument("--beside", choices=MODELS, help="a model in training that takes its share of that memory")
    parser.add_argument("--variant", metavar="A,B", help="only these variants")
    parser.add_argument("--rows", nargs="+", default=["outputs"], metavar="PLACE", help="rows to fit to (outputs)")
    parser.add_argument("--gpu", metavar="NAME", help="your GPU, of which there are rows to fit to (the one with most)")
    parser.add_argument("--format", default="text", choices=("text", "json"))
    parser.add_argument(
        "--validate",
        action="store_true",
        help="predict measured cells, tp sizes and the largest cell from the others, and show the errors",
    )
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw where a variant runs out of memory (.png, .svg)"
    )
    parser.add_argument("--workload", default=workload.name, choices=predictable(), help=f"({workload.name})")
    return parser


def _add_size(parser: argparse.ArgumentParser, size: Field[Any], workload: Workload) -> None:
    """Add the option for one field of the size. Its help and choices are those of the job's field."""
    owner = workload.problem if size.name in {field.name for field in fields(workload.problem)} else Job
    help_text = next(field.metadata["help"] for field in fields(owner) if field.name == size.name)
    choices = typing.get_args(typing.get_type_hints(owner)[size.name])
    parser.add_argument(
        _flag(size.name),
        dest=size.name,
        default=size.default,
        help=f"{help_text} ({size.default})",
        **({"choices": choices} if choices else {"type": whole_numbers, "metavar": _flag(size.name)[2:].upper()}),
    )


def _positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be above 0")
    return value


def _flag(name: str) -> str:
    return f"--{name.removesuffix('_size')}"


def _sizes(workload: Workload, options: argparse.Namespace) -> list[Any]:
    """Return a size for every combination of the numbers that the user gave."""
    size = cost_model_of(workload).size
    names = [field.name for field in fields(size)]
    given = [value if isinstance(value := getattr(options, name), list) else [value] for name in names]
    return [size(**dict(zip(names, values, strict=True))) for values in itertools.product(*given)]


def _answers(
    cells: MeasuredCells, fitted: Mapping[str, VariantModel], workload: Workload, options: argparse.Namespace
) -> list[Answer]:
    """Return the answer for each size. Raises JobError for a size that no job can have or no row tells about."""
    target = find_target(cells, options.gpu, options.gpu_memory, options.bandwidth, MODELS.get(options.beside))
    answers = []
    for size in _sizes(workload, options):
        values = {field.name: getattr(size, field.name) for field in fields(size) if field.name != "tp_size"}
        problem = workload.problem(**values)
        if complaints := problem.check(size.tp_size, 1):
            raise JobError("\n".join(complaints))
        able = {
            label: model
            for label, model in fitted.items()
            if size.kind in model.kinds
            and not workload.variants[label.split()[0]].unsupported_reason(problem, size.tp_size)
        }
        chosen = _chosen(able, options)
        if not chosen:
            raise JobError(f"{size.kind} was not measured on {cells.gpu}")
        predictions = [model(size, target.slowdown) for model in chosen.values()]
        question = cells.cost_model.question
        answers.append(Answer(size, predictions, chosen, target, question, filtered=bool(options.variant)))
    return answers


def _chosen(able: Mapping[str, VariantModel], options: argparse.Namespace) -> Mapping[str, VariantModel]:
    """Return the models that `--variant` names, or all. Raises JobError for a variant without a model."""
    if not options.variant:
        return able
    names = options.variant.split(",")
    for name in names:
        if name not in able:
            raise JobError(unknown("variant with enough cells", name, able))
    return {name: able[name] for name in names}


def _picture(
    cells: MeasuredCells, fitted: Mapping[str, VariantModel], sizes: Sequence[ProblemSize], file: Path
) -> None:
    from tpbench.predict.picture import draw
    from tpbench.report.plots import style

    style.require()
    if len(sizes) > 1:
        raise JobError("--picture draws one problem: give one number for each size")
    if (plot := cells.cost_model.plot) is None:
        raise JobError("the workload's cost model has no plot")
    if plot.variants[0] not in fitted:
        raise JobError(f"{plot.variants[0]} was not measured in enough cells")
    form = file.suffix.removeprefix(".")
    if form not in ("png", "svg"):
        raise JobError(f"--picture {file} must end in .png or .svg")
    with style.drawing("feasible"):
        figure = draw([fitted[name] for name in plot.variants if name in fitted], plot, cells.cells, sizes[0])
        file.write_bytes(style.file_content(figure, form))
    print(f"predict: wrote {file}", file=sys.stderr)


_FACTORS = {"k": 2**10, "m": 2**20}


def whole_numbers(text: str) -> list[int]:
    """Return the numbers, separated by commas. `128k` is 128 * 1024."""
    return [_whole_number(part.strip()) for part in text.split(",")]


def _whole_number(text: str) -> int:
    factor = _FACTORS.get(text[-1:].lower(), 1)
    digits = text[:-1] if factor > 1 else text
    if not digits.isdecimal() or int(digits) < 1:
        raise argparse.ArgumentTypeError(
            f"{text or 'nothing'} is no whole number of at least 1: write 131072 or 128k, and 4,8 for several"
        )
    return factor * int(digits)


LEFT_OUT = {"one cell": (0.10, 0.03), "all cells of a tp size": (0.25, 0.03), "the largest cell": (0.10, 0.03)}
"""What is predicted from the other cells, with the aims: largest median error of the times, and of the memory."""


def validation(models: Mapping[str, VariantModel], measured: MeasuredCells) -> tuple[str, bool]:
    """Return a table of the median errors on cells that were left out, and true if those of all variants together reach
    the aims."""
    columns = ["left out", "variant", "predicted", "wall time", "device time", "peak memory"]
    rows, reached = [], True
    for left_out, (time_aim, memory_aim) in LEFT_OUT.items():
        pooled: dict[str, list[float]] = {name: [] for name in QUANTITIES}
        for label, model in models.items():
            errors = leave_out(measured.cost_model, model.cells, _groups(left_out, model.cells))
            rows.append([left_out, label, f"{len(errors['device_ms'])} of {len(model.cells)}", *_medians(errors)])
            for name, found in errors.items():
                pooled[name] += found
        rows.append([left_out, "all", "", *_medians(pooled)])
        rows.append([left_out, "aim: at most", "", f"{time_aim:.0%}", f"{time_aim:.0%}", f"{memory_aim:.0%}"])
        aims = dict(zip(QUANTITIES, (time_aim, time_aim, memory_aim), strict=True))
        reached &= all(not errors or bool(np.median(errors) <= aims[name]) for name, errors in pooled.items())
    lines = [
        f"median errors of cells measured on {measured.gpu} that were predicted from the others (times that the others "
        "do not determine are not predicted)",
        *aligned_lines(columns, rows),
        *_memory_validation(models),
        "the aims are reached" if reached else "the aims are not reached",
    ]
    return "\n".join(lines) + "\n", reached


def _groups(left_out: str, cells: Sequence[MeasuredCell]) -> list[set[Any]]:
    """Return the groups of sizes that are left out together."""
    sizes = dict.fromkeys(cell.size for cell in cells)
    if left_out == "one cell":
        return one_by_one(cells)
    if left_out == "the largest cell":
        return [{max(sizes, key=lambda size: size.inputs_gib * size.tp_size)}]
    return [{size for size in sizes if size.tp_size == ranks} for ranks in {size.tp_size for size in sizes}]


def _medians(errors: Mapping[str, Sequence[float]]) -> list[str]:
    return [f"{np.median(errors[name]):.1%}" if errors[name] else "-" for name in QUANTITIES]


def _memory_validation(models: Mapping[str, VariantModel]) -> list[str]:
    """Return a count of the cells that ran out of memory and were predicted to, and the others, one on each line."""
    failed = [(model, cell) for model in models.values() for cell in model.ran_out]
    if not failed:
        return ["no cell ran out of memory, so no row checks that prediction"]
    lines = []
    for model, cell in failed:
        others = replace(model, ran_out=tuple(other for other in model.ran_out if other.size != cell.size))
        predicted, free = others(cell.size), free_gib(cell.memory_limit_gib or 0.0, cell.size)
        if (outcome := predicted.memory_outcome(free)) != "OOM":
            needed = f"{number(predicted.needed_gib)} GiB of {number(free)} GiB"
            lines.append(f"  {model.label}, {cell.size}: predicted {outcome}, {needed}")
    predicted_count = len(failed) - len(lines)
    return [
        f"{predicted_count} of {len(failed)} cells that ran out of memory are predicted to from the others (no aim)",
        *lines,
    ]
