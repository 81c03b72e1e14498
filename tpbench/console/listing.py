"""`python -m tpbench list [TOPIC]`: all choices on one screen, the choices of a topic, or one choice in detail."""

import dataclasses
import shlex
import textwrap
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tpbench import packages
from tpbench.console import choices
from tpbench.console.choices import Entry, choice, names, sections_of, shapes
from tpbench.job import Job, parse_job, unsupported_reason
from tpbench.launcher.options import CONF, GROUPS, SlurmSettings, SweepOptions, store_defaults
from tpbench.measure import machine
from tpbench.measure.session import MeasureSettings
from tpbench.settings import JobError, spelled
from tpbench.suggestions import unknown
from tpbench.tables import aligned_lines
from tpbench.workloads import NAMES, Variant, Workload, variants, workloads

WIDTH = 100
"""Most columns of a line."""
_LABEL = 18
"""Columns of the overview's labels."""
_MORE = """\
More:  python -m tpbench ...
  list entropy_loss       a workload: a line for each variant and shape, and its fields
  list variant=triton_tp  one choice: what it is, whether it runs here, its options, a command
  list variants           a line for each variant, and whether it runs here
  list shapes             a line for each shape; so do models, losses, experiments, fields
  list all                every choice with its line
"""


def main(arguments: Sequence[str]) -> int:
    """Print the list. The exit code is 0. Raises JobError for invalid arguments."""
    gpus = machine.gpu_count()
    arguments = _with_folders(arguments)
    if not arguments:
        print(overview(_machine(gpus), gpus), end="")
    for topic in arguments:
        if topic not in workloads():  # a choice may be named without its group
            topic = next((f"{group}={topic}" for group in GROUPS if topic in names(group)), topic)
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
            print(fields_of(topic), end="")
    return 0


def _with_folders(arguments: Sequence[str]) -> Sequence[str]:
    """Return the topics. Add the folder of --config-dir, which sweeps have too."""
    if not any(argument.startswith("-") for argument in arguments):
        return arguments
    from tpbench.launcher.command_line.arguments import config_folders, parse_options

    parsed, unknown_options = parse_options(arguments)
    if unknown_options:
        raise JobError(f"list has no option {unknown_options[0]}, but --config-dir")
    choices.folders[:] = config_folders(arguments)
    return list(parsed.overrides)


def overview(machine_text: str, gpus: int) -> str:
    """Return the names of all choices on one screen, for a machine with that many GPUs."""
    lines = [f"This machine: {machine_text}. A choice marked with - cannot run on it."]
    if not gpus:
        lines.append("A choice marked with ~ runs in Triton's interpreter: correct, but its time isn't a measurement.")
    lines += ["", "variant=  by workload"]
    for name in workloads():
        lines += _wrapped(f"  {name}", " ".join(_marked_names(sections_of(name, gpus)[0][1])))
    presets = next(entries for title, entries in sections_of("variants", gpus) if title == choices.PRESETS)
    lines += [*_wrapped("  with options", " ".join(entry.name for entry in presets)), "", "shape=  by workload"]
    for name in workloads():
        ordered = sorted(_marked_names(shapes(gpus, name)), key=lambda name: "tiny" not in name)
        lines += _wrapped(f"  {name}", textwrap.shorten(" ".join(ordered), WIDTH - _LABEL, placeholder=" ..."))
    lines.append("")
    for label, topic in (("model=", "models"), ("loss=", "losses"), ("+experiment=", "experiments")):
        lines += _wrapped(label, " ".join(entry.name for _, entries in sections_of(topic, gpus) for entry in entries))
    return "\n".join([*lines, "", _MORE])


def _marked_names(entries: Sequence[Entry]) -> list[str]:
    """Return the names, with a mark before each that this machine cannot run or cannot measure."""
    marks = {choices.AVAILABLE: "", choices.INTERPRETED: "~", "on the CPU": ""}
    return [f"{marks.get(entry.availability, '-')}{entry.name}" for entry in entries]


def _wrapped(label: str, text: str, width: int = _LABEL) -> list[str]:
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
    owners = {"every job": Job, "a measurement": MeasureSettings, "a whole sweep": SweepOptions}
    values = _composed(next(iter(variants())))
    shared = [_section(owner, settings, values) for owner, settings in owners.items()]
    slurm = _section("Slurm jobs: hydra.launcher.NAME=VALUE", SlurmSettings, {})
    return "\n".join([*shared, *map(fields_of, NAMES), slurm])


def fields_of(workload: str) -> str:
    """Return the fields of one workload's problem, with the defaults that its first variant has."""
    owner = workloads()[workload]
    return _section(workload, owner.problem, _composed(next(iter(owner.variants))))


def _section(owner: str, settings: type[Any], values: Mapping[str, Any]) -> str:
    return "\n".join([f"Fields of {owner}, as NAME=DEFAULT", *_field_lines(settings, values)]) + "\n"


def _field_lines(settings: type[Any], values: Mapping[str, Any], chosen: Collection[str] | None = None) -> list[str]:
    """Return wrapped lines for some fields, or for all: NAME=DEFAULT, then the help with the valid values.

    `values` are those of a composed job without a shape: a field that is not among them comes from the shape.
    """
    texts, hints = {}, typing.get_type_hints(settings)
    for field in dataclasses.fields(settings):
        hint, value = hints[field.name], values.get(field.name, field.default)
        holds_fields = hint is Any or any(map(dataclasses.is_dataclass, (hint, *typing.get_args(hint))))
        if holds_fields or (chosen is not None and field.name not in chosen):
            continue
        limits = {"at least": field.metadata["low"], "at most": field.metadata["high"]}
        known = ", ".join(f"{words} {limit}" for words, limit in limits.items() if limit is not None)
        if typing.get_origin(hint) is typing.Literal:
            known = " ".join(map(str, typing.get_args(hint)))
        owner = ("from shape= or model=" if "model" in hints else "from shape=") * (value is dataclasses.MISSING)
        notes = "; ".join(filter(None, (known, owner)))
        head = f"  {field.name}={'' if value is dataclasses.MISSING else spelled(value)}"
        texts[head] = f"{field.metadata['help']}{f' [{notes}]' * bool(notes)}"
    width = max(map(len, texts), default=0) + 2
    return [line for head, text in texts.items() for line in _wrapped(head, text, width)]


OWN_SIZE = "tp_size=2 measure=quick"
"""End of a command line with a variant of a workload from outside, which has no shapes."""


def description(group: str, name: str, gpus: int) -> str:
    """Return the description of `group=name`. Raises JobError if there is none."""
    from tpbench.launcher.command_line.outside_choices import find_outside  # late: it imports Hydra

    if group not in GROUPS:
        raise JobError(unknown("group", group, GROUPS))
    if group == "variant" and name not in names("variant") and (outside := find_outside(name)):
        lines = _of_variant(name, outside.of_workload, outside.variant, gpus)
        lines.insert(-1, f"Version {outside.version}: a hash of the code. Rows of another version are stale.")
    elif group == "variant" and name in variants():
        lines = _of_variant(name, *variants()[name], gpus)
    else:
        file = choices.choice_file(group, name)
        text = file.read_text(encoding="utf-8-sig").splitlines()
        lines = [*(f"  {line}".rstrip() for line in text if "@package" not in line), "", f"This is {file}."]
    return "\n".join([f"{group}={name}", *lines]) + "\n"


def _of_variant(name: str, workload: Workload, variant: Variant, gpus: int) -> list[str]:
    missing = packages.missing(variant.requires)
    facts = {
        "a variant of": f"{workload.name}: {workload.summary}",
        "runs here:": choices.availability(variant, gpus, workload.option_defaults),
        "install it with:": packages.install_commands(missing) if missing else "",
        "not on GPUs:": variant.cpu_only_reason,
        "no graph=true:": variant.no_graph_reason if isinstance(variant.no_graph_reason, str) else "",
    }
    if workload.definition is not None:
        defaults = {field.name: field.default for field in dataclasses.fields(workload.problem)}
        values = {name: "VALUE" for name, default in defaults.items() if default is dataclasses.MISSING}
        fields, command = _field_lines(workload.problem, values), OWN_SIZE
    else:
        values = _composed(name if name in workload.variants else next(iter(workload.variants)))
        supported = supported_shapes(values)
        if name in workload.variants:
            facts["shapes:"] = " ".join(supported) or "none"
        fields, command = _field_lines(workload.problem, values, variant.options), example_command(workload, supported)
    lines = [f"  {variant.summary}", *(f"  {label} {text}" for label, text in facts.items() if text)]
    heading = "Its options, beside the fields of every job:" if fields else "It has no options of its own."
    return [*lines, "", heading, *fields, "", f"python -m tpbench {shlex.quote(f'variant={name}')} {command}"]


def _composed(variant: str) -> dict[str, Any]:
    """Return what a job of the variant has without a shape."""
    import hydra
    from omegaconf import OmegaConf

    store_defaults()
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        values: Any = OmegaConf.to_container(hydra.compose("config", [f"variant={variant}", "~shape"]))
    return dict(values)


def supported_shapes(values: Mapping[str, Any]) -> list[str]:
    """Return the shapes that a variant supports, smallest first. `values`: its composed job without a shape."""

    def is_supported(shape: str) -> bool:
        sizes = choice("shape", shape)
        model = choice("model", sizes["model"]) if "model" in sizes else {}
        return unsupported_reason(parse_job({**values, **model, **sizes})) is None

    return [entry.name for entry in shapes(0, variants()[values["variant"]][0].name) if is_supported(entry.name)]


def example_command(workload: Workload, supported: Sequence[str]) -> str:
    """Return the end of the command line that runs soonest: with a tiny shape if there is one."""
    shape = next((name for name in supported if name.startswith("tiny")), supported[0] if supported else "NAME")
    return f"shape={shape}{'' if workload.scheduled is True else ' measure=quick'}"
