"""`python -m tpbench list [TOPIC]`: all choices on one screen, the choices of a topic, or one choice in detail."""

import dataclasses
import math
import shlex
import textwrap
import typing
from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from tpbench import packages
from tpbench.job import Job, field_defaults, parse_job, trait_of, unsupported_reason
from tpbench.launcher.options import CONF, GROUPS, SlurmSettings, SweepOptions, read_choice, unknown_choice
from tpbench.measure import machine
from tpbench.measure.session import MeasureSettings
from tpbench.settings import JobError, defaults, kinds_of, spelled
from tpbench.suggestions import unknown
from tpbench.tables import aligned_lines
from tpbench.workloads import NAMES, Variant, Workload, variants, workloads

WIDTH = 100
"""Most columns of a line."""
_MORE = """
More:  python -m tpbench ...
  list entropy_loss       a workload: a line for each variant and shape, and its fields
  list variant=triton_tp  one choice: what it is, whether it runs here, its options, a command
  list variants           a line for each; so do shapes, models, losses, experiments, fields, all
"""
AVAILABLE = "yes"
ON_CPU = "on the CPU"
INTERPRETED = "interpreted: correct, but no measurement"
TOPICS = {
    "all": "",
    "variants": "variant=",
    "shapes": "shape=",
    "models": "model=",
    "losses": "loss=",
    "experiments": "+experiment=",
}
"""Kinds of choices, each with the start of its headings."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One choice on the command line."""

    name: str
    summary: str
    availability: str = AVAILABLE
    """`yes`, or the reason or the condition."""


def main(arguments: Sequence[str]) -> int:
    """Print the list. The exit code is 0. Raises JobError for invalid arguments."""
    gpus = machine.gpu_count()
    if not arguments:
        print(overview(_machine(gpus), gpus), end="")
    for topic in arguments:
        group, equals, name = topic.lstrip("+").partition("=")
        if equals:
            print(description(group, name, gpus), end="")
        elif topic == "fields":
            print(all_fields(), end="")
        else:
            sections = sections_of(topic, gpus)
            print(f"This machine: {_machine(gpus)}. The second column says whether it can run each.\n")
            for title, entries in sections:
                rows = [[f"  {entry.name}", entry.availability, entry.summary] for entry in entries]
                print(title, *aligned_lines([""] * 3, rows)[1:], "", sep="\n")
        if topic in workloads():
            print(_section(topic, workloads()[topic].problem), end="")
    return 0


def overview(machine_text: str, gpus: int) -> str:
    """Return the names of all choices on one screen, for a machine with that many GPUs."""
    lines = [f"This machine: {machine_text}. A choice marked with - cannot run on it."]
    if not gpus:
        lines.append("A choice marked with ~ runs in Triton's interpreter: correct, but its time isn't a measurement.")
    marks = {AVAILABLE: "", INTERPRETED: "~", ON_CPU: ""}
    for heading, entries in sections_of("all", gpus):
        text = " ".join(f"{marks.get(entry.availability, '-')}{entry.name}" for entry in entries)
        if heading.startswith("shape="):
            text = textwrap.shorten(text, WIDTH - 28, placeholder=" ...")
        lines += _wrapped(heading.partition(",")[0], text, 28)
    return "\n".join([*lines, _MORE])


def _wrapped(label: str, text: str, width: int) -> list[str]:
    """Return wrapped lines, with a label in the first columns of the first one."""
    lines = textwrap.wrap(text, WIDTH - width, break_long_words=False, break_on_hyphens=False)
    return [f"{label if at == 0 else '':<{width}}{line}" for at, line in enumerate(lines)]


def _machine(gpus: int) -> str:
    facts = machine.facts()
    if gpus:
        return f"{gpus} x {facts.get('gpu_name', 'GPU')}"
    return f"no GPU, {facts['cpu_count']} cores, {machine.available_memory_gib():.0f} GiB free"


def all_fields() -> str:
    """Return the fields of every job, of a measurement, of a whole sweep, of each workload and of Slurm."""
    owners: dict[str, type] = {"every job": Job, "a measurement": MeasureSettings, "a whole sweep": SweepOptions}
    owners |= {name: workloads()[name].problem for name in NAMES}
    owners["Slurm jobs: hydra.launcher.NAME=VALUE"] = SlurmSettings
    return "\n".join(_section(*item) for item in owners.items())


def _section(owner: str, settings: type[Any]) -> str:
    return "\n".join([f"Fields of {owner}, as NAME=DEFAULT", *_field_lines(settings)]) + "\n"


def _field_lines(settings: type[Any], chosen: Collection[str] | None = None) -> list[str]:
    """Return wrapped lines for some fields, or for all: NAME=DEFAULT, then the help with the valid values."""
    texts: dict[str, str] = {}
    values, hints = defaults(settings), typing.get_type_hints(settings)
    for field in dataclasses.fields(settings):
        hint = hints[field.name]
        holds_fields = hint is Any or any(map(dataclasses.is_dataclass, kinds_of(hint)))
        if holds_fields or (chosen is not None and field.name not in chosen):
            continue
        limits = {"at least": field.metadata["low"], "at most": field.metadata["high"]}
        known = ", ".join(f"{words} {limit}" for words, limit in limits.items() if limit is not None)
        for kind in kinds_of(hint):
            if typing.get_origin(kind) is typing.Literal:
                known = " ".join(map(str, typing.get_args(kind)))
        notes = "; ".join(filter(None, (known, "" if field.name in values else "no default")))
        head = f"  {field.name}={spelled(values[field.name]) if field.name in values else ''}"
        texts[head] = f"{field.metadata['help']}{f' [{notes}]' * bool(notes)}"
    width = max(map(len, texts), default=0) + 2
    return [line for head, text in texts.items() for line in _wrapped(head, text, width)]


def description(group: str, name: str, gpus: int) -> str:
    """Return the description of `group=name`. Raises JobError if there is none."""
    from tpbench.launcher.command_line.outside_choices import find_outside  # late: it imports Hydra

    if group not in GROUPS:
        raise JobError(unknown("group", group, GROUPS))
    if group == "variant" and name not in names("variant") and (outside := find_outside(name)):
        lines = _of_variant(name, outside.of_workload, outside.variant, gpus)
    elif group == "variant" and name in variants():
        lines = _of_variant(name, *variants()[name], gpus)
    else:
        choice(group, name)
        file = CONF / group / f"{name}.yaml"
        lines = [*(f"  {line}".rstrip() for line in file.read_text().splitlines()), "", f"This is {file}."]
    return "\n".join([f"{group}={name}", *lines]) + "\n"


def _of_variant(name: str, workload: Workload, variant: Variant, gpus: int) -> list[str]:
    missing = packages.missing(variant.requires)
    facts = {
        "a variant of": f"{workload.name}: {workload.summary}",
        "runs here:": availability(variant, gpus, workload.option_defaults),
        "install it with:": packages.install_commands(missing) if missing else "",
        "not on GPUs:": variant.cpu_only_reason,
        "no graph=true:": variant.no_graph_reason if isinstance(variant.no_graph_reason, str) else "",
    }
    fields = _field_lines(workload.problem, None if workload.definition else variant.options)
    lines = [f"  {variant.summary}", *(f"  {label} {text}" for label, text in facts.items() if text)]
    heading = "Its options, beside the fields of every job:" if fields else "It has no options of its own."
    command = f"python -m tpbench {shlex.quote(f'variant={name}')} {example_arguments(workload, name)}"
    return [*lines, "", heading, *fields, "", command]


def example_arguments(workload: Workload, variant: str = "") -> str:
    """Return the arguments with which a variant of a workload runs soonest, those of a workload's first by default."""
    if workload.definition is not None:
        return "tp_size=2 measure=quick"  # a user's workload has no shapes
    variant = variant if variant in workload.variants else next(iter(workload.variants))
    values = field_defaults(workload.name) | choice("variant", variant)
    for shape in shapes(0, workload.name):
        sizes = choice("shape", shape.name)
        model = choice("model", sizes["model"]) if "model" in sizes else {}
        if unsupported_reason(parse_job({**values, **model, **sizes})) is None:
            return f"shape={shape.name}{'' if workload.scheduled is True else ' measure=quick'}"
    return "shape=NAME"


def names(group: str) -> list[str]:
    """Return the choices of a configuration group."""
    return sorted(file.stem for file in (CONF / group).glob("*.yaml"))


def choice(group: str, name: str) -> dict[str, Any]:
    """Return the values that a file of conf/ sets, with the choices of other groups, such as `model`, that it makes."""
    file = CONF / group / f"{name}.yaml"
    if not file.is_file():
        raise JobError(unknown_choice(group, name, names(group)))
    values = read_choice(file)
    made = [item for item in values.pop("defaults", ()) if isinstance(item, dict)]
    return {str(key).rpartition("/")[2]: name for item in made for key, name in item.items()} | values


def sections_of(topic: str, gpus: int) -> list[tuple[str, list[Entry]]]:
    """Return the headings and entries of a topic: `all`, a kind of choices such as `shapes`, or a workload's name.

    The words of a heading before a comma name the section. Raises JobError if there is no such topic.
    """
    if topic not in TOPICS and topic not in workloads():
        raise JobError(unknown("topic of list", topic, (*TOPICS, "fields", *workloads(), "variant=NAME")))
    sections = [
        *(_variants(workloads()[name], gpus) for name in NAMES),
        ("variant=  with options", [entry for entry in _commented("variant") if entry.name not in variants()]),
        *((f"shape=  of {name}", shapes(gpus, name)) for name in NAMES),
        ("model=, with any shape of a model; or a path to a local folder with a config.json", _commented("model")),
        ("loss=", _commented("loss")),
        ("+experiment=, with -m", _commented("experiment")),
        ("measure=", _commented("measure")),
    ]
    if topic in workloads():
        return [section for section in sections if section[0].partition(",")[0].endswith(f"  of {topic}")]
    return [section for section in sections if section[0].startswith(TOPICS[topic])]


def _variants(workload: Workload, gpus: int) -> tuple[str, list[Entry]]:
    defaults, named = workload.option_defaults, workload.variants.items()
    entries = [Entry(name, variant.summary, availability(variant, gpus, defaults)) for name, variant in named]
    return f"variant=  of {workload.name}, {workload.summary}", entries


def availability(variant: Variant, gpus: int, options: Mapping[str, Any]) -> str:
    """Return whether a variant with these options runs on a machine with that many GPUs."""
    if missing := packages.missing(variant.requires):
        return f"no: needs {', '.join(missing)} (not installed)"
    if variant.requires_cuda is True and not gpus:
        return "no: needs a CUDA GPU"
    triton = trait_of(variant.uses_triton, SimpleNamespace(**options))
    return INTERPRETED if triton and not gpus else AVAILABLE


def shapes(gpus: int, workload: str) -> list[Entry]:
    """Return the shapes of a workload with their sizes: tiny ones first, then those of fewer ranks."""
    found = []
    for name in names("shape"):
        values = choice("shape", name)
        if values.pop("shape_workload") == workload:
            ranks = math.prod(values.get(field, 1) for field in ("tp_size", "dp_size"))
            runs = AVAILABLE if ranks <= gpus else f"no: needs {ranks} GPUs, found {gpus}" if gpus else ON_CPU
            sizes = " ".join(f"{field}={spelled(value)}" for field, value in values.items())
            found.append(((not name.startswith("tiny"), ranks, values.get("vocab", 0)), Entry(name, sizes, runs)))
    return [entry for _, entry in sorted(found, key=lambda item: item[0])]


def _commented(group: str) -> list[Entry]:
    """Return the choices of a group. The summary of a choice is the first comment in its file."""
    entries = []
    for name in names(group):
        lines = (CONF / group / f"{name}.yaml").read_text().splitlines()
        comments = (line.lstrip("# ") for line in lines if line.startswith("#") and "@package" not in line)
        entries.append(Entry(name, next(comments, "")))
    return entries
