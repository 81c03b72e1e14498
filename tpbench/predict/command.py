"""`tpbench predict`: the predicted time and memory of a problem that was not measured."""

import argparse
import itertools
import typing
from collections.abc import Sequence
from dataclasses import fields
from typing import NoReturn

from tpbench.job import Job
from tpbench.measure.machine import KNOWN_GPUS
from tpbench.predict.answer import Answer, document
from tpbench.predict.cells import measured
from tpbench.predict.model import VariantModel, models
from tpbench.predict.target import NODE_GPUS, Target, find_target
from tpbench.predict.validation import validation
from tpbench.report import command_line
from tpbench.settings import JobError, checked_value
from tpbench.suggestions import unknown
from tpbench.workloads.entropy_loss import WORKLOAD, EntropyLoss
from tpbench.workloads.entropy_loss.cost_model import LossSize, sends_parts

SETTINGS = {field.name: field for owner in (Job, EntropyLoss) for field in fields(owner)}
"""The declarations of all numbers and choices of a size, among others."""


def main(arguments: Sequence[str]) -> int:
    """Run the command. Return 1 if a validation misses its aims. Raises JobError for what cannot be answered."""
    options = _parser().parse(arguments)
    cells = measured(command_line.read_rows(options.rows), options.gpu)
    fitted, left_out = models(cells)
    if not fitted:
        raise JobError(f"no variant was measured in enough cells on {cells.gpu} to predict from")
    is_named = options.variant is not None
    names = options.variant.split(",") if is_named else [*fitted]
    for name in names:
        if name not in fitted:
            raise JobError(unknown("variant with enough cells", name, fitted))
    if options.validate:
        content, reached = validation(left_out, names, cells.gpu)
    else:
        target = find_target(cells, options.gpu, options.gpu_memory)
        chosen, reached = [fitted[name] for name in dict.fromkeys(names)], True
        content = document([_answer(size, chosen, target, is_named) for size in _sizes(options)])
    command_line.write(content, options)
    return 0 if reached else 1


class _Parser(command_line.ReportParser):
    def error(self, message: str) -> NoReturn:
        elsewhere = "for others `python -m tpbench -m variant=NAME shape=NAME dry_run=true` says time and memory"
        super().error(f"{message}; predict answers for the workload {WORKLOAD.name}, {elsewhere}")


def _parser() -> command_line.ReportParser:
    parser = _Parser(
        "predict",
        tuple(command_line.TABLES),
        description=f"Time, communication and memory of any problem of {WORKLOAD.name}, from a model fitted to rows.",
        epilog="Sizes may be lists and have a unit: --tp 4,8 --vocab 128k (k is 1024). For other workloads see "
        "dry_run=true.",
    )
    add = parser.add_argument
    for field in fields(LossSize):
        flag, help_text = f"--{field.name.removesuffix('_size')}", SETTINGS[field.name].metadata["help"]
        add(flag, dest=field.name, metavar="A,B", default=str(field.default), help=f"{help_text} ({field.default})")
    add("--gpu-memory", type=float, metavar="GIB", help="memory for the loss, without your model's (that of the GPU)")
    add("--variant", metavar="A,B", help="only these variants")
    add("--rows", nargs="+", default=["outputs"], metavar="PLACE", help="rows to fit to (outputs)")
    add("--gpu", metavar="NAME", help=f"one with rows, or {', '.join(KNOWN_GPUS)} (this machine's, else that of rows)")
    validate = "leave out what was measured, predict it from the rest, and show how many error bars hold"
    add("--validate", action="store_true", help=validate)
    return parser


def _sizes(options: argparse.Namespace) -> list[LossSize]:
    """Return all combinations of the sizes that the options name. Raises JobError for an invalid value."""
    hints = typing.get_type_hints(Job) | typing.get_type_hints(EntropyLoss)
    texts = {field.name: getattr(options, field.name).split(",") for field in fields(LossSize)}
    values = [[checked_value(SETTINGS[name], hints[name], text) for text in given] for name, given in texts.items()]
    return [LossSize(*combination) for combination in itertools.product(*values)]


def _answer(size: LossSize, fitted: Sequence[VariantModel], target: Target, is_named: bool) -> Answer:
    """Return the predictions of the variants that can run a size. Raises JobError if one that is named cannot."""
    problem = EntropyLoss(**{name: value for name, value in vars(size).items() if name != "tp_size"})
    if size.tp_size > NODE_GPUS:
        raise JobError(f"tp_size={size.tp_size} is not predicted: rows are of one node, at most {NODE_GPUS} GPUs")
    if complaints := problem.check(size.tp_size, 1):
        raise JobError("\n".join(complaints))
    able = [model for model in fitted if size.kind in {cell.size.kind for cell in model.cells}]
    if not able:
        raise JobError(f"{size.kind} was not measured on {target.measured_on}")
    refusals = {model.label: _refusal(model.label, problem, size.tp_size, target) for model in able}
    for label, refusal in refusals.items():
        if refusal and is_named:
            raise JobError(f"{label} cannot run {size}: {refusal}")
    predictions = [model(size, target.slowdown) for model in able if not refusals[model.label]]
    known = {one.model.label.split()[0] for one in predictions if one.time}
    others = [] if is_named else [name for name in WORKLOAD.variants if name not in known]
    runs = [name for name in others if not _refusal(name, problem, size.tp_size, target)]
    return Answer(size, predictions, target, runs)


def _refusal(label: str, problem: EntropyLoss, tp_size: int, target: Target) -> str | None:
    """Return why a variant cannot run a problem on the GPUs in question, or None if it can."""
    if tp_size > 1 and not target.peers and sends_parts(label):
        return "its exchange needs GPUs that reach each other's memory, with NVLink"
    return WORKLOAD.variants[label.split()[0]].unsupported_reason(problem, tp_size)
