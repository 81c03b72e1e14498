"""`python -m tpbench list [TOPIC]`: all choices on one screen, the choices of a topic, or one choice in detail."""

from __future__ import annotations

import itertools
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tpbench import packages
from tpbench.console import fields
from tpbench.console.catalogue import INTERPRETED, PRESETS, Entry, availability, sections_of, shapes
from tpbench.console.fields import CONF, WIDTH, names
from tpbench.measure import machine
from tpbench.outside.variant import OutsideVariant
from tpbench.settings import JobError
from tpbench.suggestions import unknown
from tpbench.tables import aligned_lines
from tpbench.workloads import Variant, Workload, variants, workloads

_LABEL = 18
"""Columns of the overview's labels."""
_MORE = (
    ("list entropy_loss", "a workload: a line for each variant and shape, and its fields"),
    ("list variant=triton_tp", "one choice: what it is, whether it runs here, its options, a command"),
    ("list variants", "a line for each variant: whether it runs here, and what to install"),
    ("list shapes", "a line for each shape; so do models, losses, experiments, fields"),
    ("list all", "every choice with its line"),
)


def main(arguments: Sequence[str]) -> int:
    """Print the list. The exit code is 0, or 2 for invalid arguments."""
    gpus = machine.gpu_count()
    try:
        if not arguments:
            print(overview(_machine(gpus), gpus), end="")
        for topic in arguments:
            group, equals, name = topic.lstrip("+").partition("=")
            if equals:
                print(description(group, name, gpus), end="")
            elif topic == "fields":
                print(fields.all_fields(), end="")
            else:
                _print_sections(topic, gpus)
            if topic in workloads():
                print(fields.fields_of(topic), end="")
    except JobError as error:
        print(f"tpbench: {error}", file=sys.stderr)
        return 2
    return 0


def overview(machine_text: str, gpus: int) -> str:
    """Return the names of all choices on one screen, for a machine with that many GPUs."""
    lines = [f"This machine: {machine_text}. A choice marked with - cannot run on it."]
    if not gpus:
        lines.append("A choice marked with ~ runs in Triton's interpreter: correct, but its time is no measurement.")
    lines += ["", "variant=  by workload"]
    for name in workloads():
        lines += _wrapped(f"  {name}", _marked_names(sections_of(name, gpus)[0][1]))
    presets = next(entries for title, entries in sections_of("variants", gpus) if title == PRESETS)
    lines += _wrapped("  with options", (entry.name for entry in presets))
    lines += ["", "shape=  by workload"]
    lines += [_one_line(f"  {name}", _marked_names(shapes(gpus, name))) for name in workloads()]
    lines.append("")
    for label, topic in (("model=", "models"), ("loss=", "losses"), ("+experiment=", "experiments")):
        lines += _wrapped(label, (entry.name for _, entries in sections_of(topic, gpus) for entry in entries))
    width = max(len(command) for command, _ in _MORE)
    lines += ["", "More:  python -m tpbench ..."]
    lines += [f"  {command:<{width}}  {meaning}" for command, meaning in _MORE]
    return "\n".join(lines) + "\n"


def _marked_names(entries: Sequence[Entry]) -> list[str]:
    """Return the names, with a mark before each that this machine cannot run or cannot measure."""
    marks = [
        "-" if entry.availability.startswith("no") else "~" * (entry.availability == INTERPRETED) for entry in entries
    ]
    return [f"{mark}{entry.name}" for mark, entry in zip(marks, entries, strict=True)]


def _one_line(label: str, choices: Sequence[str]) -> str:
    """Return a label and the names that fit behind it, the tiny shapes first, with the number of the others."""
    ordered = sorted(choices, key=lambda name: not name.lstrip("-~").startswith("tiny"))
    for count in range(len(ordered), 0, -1):
        rest = f" and {len(ordered) - count} more" if count < len(ordered) else ""
        line = f"{label:<{_LABEL}}{' '.join(ordered[:count])}{rest}"
        if len(line) <= WIDTH:
            return line
    return label


def _wrapped(label: str, choices: Iterable[str]) -> list[str]:
    """Return lines with a label before the first one."""
    lines = textwrap.wrap(" ".join(choices), WIDTH - _LABEL, break_long_words=False, break_on_hyphens=False)
    return [f"{label if at == 0 else '':<{_LABEL}}{line}" for at, line in enumerate(lines)]


def _print_sections(topic: str, gpus: int) -> None:
    chosen = sections_of(topic, gpus)
    print(f"This machine: {_machine(gpus)}. The second column says whether it can run each.\n")
    for title, entries in chosen:
        rows = [[f"  {entry.name}", entry.availability, entry.summary] for entry in entries]
        print(title, *aligned_lines([""] * 3, rows)[1:], "", sep="\n")
    if topic in ("all", "variants", *workloads()):
        owners = [workloads()[topic]] if topic in workloads() else list(workloads().values())
        for command in _install_commands(owners):
            print(command)


def _install_commands(owners: Sequence[Workload]) -> list[str]:
    """Return a line for each extra of which a variant's package is missing, with the command that installs it."""
    required = {name for workload in owners for variant in workload.variants.values() for name in variant.requires}
    missing = sorted(name for name in required & set(packages.EXTRAS) if not packages.installed(name))
    by_extra = itertools.groupby(sorted(missing, key=packages.EXTRAS.__getitem__), key=packages.EXTRAS.__getitem__)
    groups = [list(found) for _, found in by_extra]
    return [f"To install {', '.join(found)}: {packages.install_commands(found)}" for found in groups]


def _machine(gpus: int) -> str:
    facts = machine.facts()
    if gpus:
        return f"{gpus} x {facts.get('gpu_name', 'GPU')}"
    return f"no GPU, {facts['cpu_count']} cores, {machine.available_memory_gib():.0f} GiB free"


def description(group: str, name: str, gpus: int) -> str:
    """Return the description of `group=name`. Raises JobError if there is none."""
    from tpbench.launcher.command_line import rewrites  # late, like the next one: they import Hydra
    from tpbench.launcher.command_line.checks import unknown_choice
    from tpbench.launcher.options import GROUPS

    if group not in GROUPS:
        raise JobError(unknown("group", group, GROUPS))
    if group == "variant" and name not in names("variant") and (outside := rewrites.find_outside(name)):
        lines = _of_variant(name, outside.of_workload, outside.variant, gpus, outside)
        lines.insert(-1, f"Version {outside.version}: a hash of the code. Rows of another version are stale.")
    elif name not in names(group):
        raise JobError(unknown_choice(group, name, names(group)))
    elif group == "variant" and name in variants():
        lines = _of_variant(name, *variants()[name], gpus)
    else:
        lines = _of_file(group, name)
    return "\n".join([f"{group}={name}", *lines]) + "\n"


def _of_variant(
    name: str, workload: Workload, variant: Variant, gpus: int, outside: OutsideVariant | None = None
) -> list[str]:
    supported = supported_shapes(variant.name, [entry.name for entry in shapes(gpus, workload.name)], outside)
    lines = [
        f"  {variant.summary}",
        f"  a variant of {workload.name}: {workload.summary}",
        f"  runs here: {availability(variant, gpus, workload.option_defaults)}",
    ]
    missing = [package for package in variant.requires if not packages.installed(package)]
    lines += [f"  install it with: {packages.install_commands(missing)}"] if missing else []
    lines += [f"  not on GPUs: {variant.cpu_only_reason}"] if variant.cpu_only_reason else []
    if isinstance(variant.no_graph_reason, str) and variant.no_graph_reason:
        lines.append(f"  no graph=true: {variant.no_graph_reason}")
    lines += [f"  shapes: {' '.join(supported) or 'none'}", ""]
    if options := fields.field_lines(workload.problem, variant.options, name):
        lines += ["Its options, beside the fields of every job and of its workload:", *options]
    else:
        lines += ["It has no options beside the fields of every job and of its workload."]
    run = f"python -m tpbench variant={name} shape={smallest(supported)}"
    return [*lines, "", f"{run}{'' if workload.scheduled is True else ' measure=quick'}"]


def _of_file(group: str, name: str) -> list[str]:
    """Return the content of a choice's file, and its name."""
    file = CONF / group / f"{name}.yaml"
    kept = [line for line in file.read_text(encoding="utf-8").splitlines() if "@package" not in line]
    return [*(f"  {line}".rstrip() for line in kept), "", f"This is conf/{group}/{file.name}."]


def supported_shapes(variant: str, candidates: Sequence[str], outside: OutsideVariant | None = None) -> list[str]:
    """Return those of the shapes that the variant supports, in their order.

    `outside`: the variant, if it is not one of this package.
    """
    import hydra
    from omegaconf import OmegaConf

    from tpbench.job import parse_job, unsupported_reason
    from tpbench.launcher.command_line import rewrites

    if outside:
        rewrites.register_choice(outside)
    known: Mapping[str, OutsideVariant] = {outside.name: outside} if outside else {}
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        common: Any = OmegaConf.to_container(hydra.compose("config", [f"variant={variant}", "~shape"]))

    def is_supported(shape: str) -> bool:
        values = fields.choice("shape", shape)
        model = fields.choice("model", values["model"]) if "model" in values else {}
        return unsupported_reason(parse_job({**common, **model, **values}, outside=known)) is None

    return [shape for shape in candidates if is_supported(shape)]


def smallest(candidates: Sequence[str]) -> str:
    """Return the tiny shape if there is one, else the first shape, or NAME if there is none."""
    return next((name for name in candidates if name.startswith("tiny")), candidates[0] if candidates else "NAME")
