"""Names on the command line, checked before Hydra composes anything, so that a typing error gets a useful answer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import OverrideParseException

from tpbench.job import former_field_names
from tpbench.launcher.options import command_line_names
from tpbench.settings import JobError, unknown
from tpbench.workloads import workloads

LAUNCHERS = ("torchrun", "torchrun_slurm", "basic")
GROUPS = ("variant", "shape", "model", "loss", "block_cap", "measure", "contender", "experiment")


_GROUP_CHOICE = re.compile(rf"[+~]?(?:{'|'.join(GROUPS)})=")
_NESTED = re.compile(r"""[()\[\]{}'"\\]""")
"""In a value that is more than a list of words."""
_OVERRIDE = re.compile(r"([+~]*)(\w+)")
_BARE_NUMBER = re.compile(r"(?<![\w'\".])(\d+)(?![\w'\".])")


def quote_numbers(arguments: Sequence[str]) -> list[str]:
    """`block_cap=4096,8192` with quotes around the numbers: Hydra takes only strings for the name of a choice."""
    return [_BARE_NUMBER.sub(r"'\1'", each) if _GROUP_CHOICE.match(each) else each for each in arguments]


def flat_names(arguments: Sequence[str]) -> list[str]:
    """`train.loss=tpbench` as `train_loss=tpbench`, and `model=path/to/folder` as `model_dir=path/to/folder`.

    `model=NAME,path/to/folder` becomes `model=NAME model_dir=null,path/to/folder`. Each of several names meets each
    folder so, which makes equal jobs: they run once.
    """
    made = []
    for each in present_names(arguments):
        name, equals, value = each.partition("=")
        if name.replace(".", "_") in command_line_names():
            name = name.replace(".", "_")
        if name == "model" and "/" in value:
            choices = [value] if _NESTED.search(value) else value.split(",")
            if names := [choice for choice in choices if "/" not in choice]:
                made.append(f"model={','.join(names)}")
            name, value = "model_dir", ",".join(["null"] * bool(names) + [each for each in choices if "/" in each])
        made.append(f"{name}{equals}{value}")
    return made


def present_names(arguments: Iterable[str]) -> list[str]:
    """Replace the former names of fields by the present ones: `organisation=fused` becomes `algorithm=fused`."""
    former = former_field_names()

    def renamed(argument: str) -> str:
        match = _OVERRIDE.match(argument)
        return f"{match[1]}{former[match[2]]}{argument[match.end() :]}" if match and match[2] in former else argument

    return [renamed(each) for each in arguments]


def force_fields(arguments: Sequence[str]) -> list[str]:
    """`width=64` as `++width=64`, for fields that only some workloads have.

    In a sweep over variants Hydra composes a job of the default one first, and that would not have it.
    """
    special = _special_fields() - set(GROUPS)
    return [f"++{each}" if _name(each) in special else each for each in arguments]


def _special_fields() -> set[str]:
    """Those that only some workloads have."""
    shared: set[str] = set.intersection(*map(command_line_names, workloads().values()))
    return command_line_names() - shared


def _name(argument: str) -> str:
    return argument.partition("=")[0]


def check_overrides(arguments: Sequence[str], conf: Path) -> None:
    """Raise JobError for a group choice or a field that does not exist, naming the valid ones and the nearest."""
    parsed, unrecognised = get_args_parser().parse_known_args(list(arguments))
    if unrecognised:
        raise JobError(f"no such option: {' '.join(unrecognised)} (python -m tpbench --help lists them)")
    loader = _loader(conf, parsed.config_dir)
    try:
        overrides = OverridesParser.create(loader).parse_overrides(parsed.overrides)
    except OverrideParseException as error:
        raise JobError(f"{str(error).splitlines()[0]} (write NAME=VALUE or, with -m, NAME=VALUE1,VALUE2)") from None
    complaints = [complaint for each in overrides for complaint in _complaints(each, loader)]
    # An experiment says itself that it is a sweep.
    if not (parsed.multirun or any(each.key_or_group in ("experiment", "hydra.mode") for each in overrides)):
        complaints += [
            f"{each.input_line} is a sweep: say -m before it (python -m tpbench -m ...)"
            for each in overrides
            if each.is_sweep_override() and not each.key_or_group.startswith("hydra")
        ]
    complaints += _launcher_complaints(overrides, conf)
    if complaints:
        raise JobError("\n".join(dict.fromkeys(complaints)))


def chosen_fields(overrides: Sequence[str]) -> list[str]:
    """The plain fields that these (not sweeping) overrides set, and groups that name one of some workloads (loss)."""
    keys = [each.key_or_group for each in OverridesParser.create().parse_overrides(list(overrides))]
    groups = set(GROUPS) - _special_fields()
    return [key for key in keys if key not in groups and not key.startswith("hydra")]


def _loader(conf: Path, more: str | None) -> ConfigLoader:
    """Hydra's own view of what the configuration groups hold."""
    search_path = create_config_search_path(f"file://{conf}")
    if more:
        search_path.append("command-line", f"file://{Path(more).absolute()}")
    return ConfigLoaderImpl(search_path)


def _complaints(override: Override, loader: ConfigLoader) -> list[str]:
    key = override.key_or_group
    if key == "hydra/launcher":
        return [unknown("launcher", each, LAUNCHERS) for each in _choices(override) if each not in LAUNCHERS]
    if key.startswith("hydra") or override.is_delete():
        return []
    if key not in GROUPS:
        return [] if key in command_line_names() else [unknown("field", key, command_line_names() | set(GROUPS))]
    choices = _choices(override)
    valid = loader.get_group_options(key)
    complaints = [unknown(key, choice, valid) for choice in choices if choice not in valid]
    if key in ("experiment", "contender") and not override.is_add():
        complaints.append(f"{key}s are added, with a plus: +{key}={choices[0]}")
    return complaints


def _choices(override: Override) -> list[str]:
    sweeps = override.is_sweep_override() and override.is_discrete_sweep()
    elements = list(override.sweep_string_iterator()) if sweeps else [override.get_value_element_as_str()]
    return [element.strip("'\"") for element in elements]


def _launcher_complaints(overrides: Sequence[Override], conf: Path) -> list[str]:
    """Options that the chosen launcher does not have: Hydra would not say which there are."""
    chosen = [_choices(each)[0] for each in overrides if each.key_or_group == "hydra/launcher"]
    file = conf / "hydra" / "launcher" / f"{(chosen or ['torchrun'])[-1]}.yaml"
    if not file.exists():
        return []
    valid = [name for name in yaml.safe_load(file.read_text()) if not name.startswith("_")]
    names = [str(each.key_or_group).split(".")[2] for each in overrides if _of_launcher(each)]
    if not valid:
        return [
            f"{file.stem} has no options: hydra.launcher.{name} needs hydra/launcher=torchrun_slurm" for name in names
        ]
    return [unknown(f"option of {file.stem}", name, valid) for name in names if name not in valid]


def _of_launcher(override: Override) -> bool:
    return override.key_or_group.startswith("hydra.launcher.")
