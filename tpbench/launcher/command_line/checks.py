"""Checks of the command line before Hydra composes anything, so that a typing error gets a useful message."""

from __future__ import annotations

import math
import re
import shlex
from argparse import Namespace
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override, RangeSweep
from hydra.errors import OverrideParseException

from tpbench.launcher.command_line.rewrites import CONF, OUTPUT_FOLDERS, command_line_variants, config_folders
from tpbench.launcher.hydra_internals import options_parser
from tpbench.launcher.options import COMMANDS, GROUPS, command_line_names, read_choice
from tpbench.settings import JobError, user_path
from tpbench.suggestions import nearest, printable, unknown

_SEVERAL = re.compile(r"\s+(?=[+~]*[\w./]+=)")
"""White space before another NAME= within one argument."""
_ONE_DASH = re.compile(r"-[a-z_]{3,}")
"""A word after one dash. Hydra's options of one dash have one or two letters."""


def parse_options(arguments: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Return Hydra's options with the overrides, and the options that Hydra does not have.

    Raises JobError for an option with a wrong value, or without one that it needs.
    """
    for each in arguments:
        if _ONE_DASH.match(each):  # argparse would take the first letter for an option, such as -m
            raise JobError(f"{each}: a field has no dash in front ({each[1:]}), and a long option of Hydra has two")
    parser = options_parser()

    def raise_error(message: str) -> NoReturn:
        raise JobError(f"{message} (python -m tpbench --hydra-help lists Hydra's options)")

    setattr(parser, "error", raise_error)  # noqa: B010  mypy forbids an assignment; argparse would print its own usage
    parsed, rest = parser.parse_known_intermixed_args(list(arguments))
    return parsed, [each for each in rest if each.startswith("-")]


def options_first(arguments: Sequence[str]) -> list[str]:
    """Return Hydra's options, such as -m, and after them all overrides.

    Hydra's own parser rejects overrides after an option that itself stands after an override.
    """
    parsed, _ = parse_options(arguments)
    options = list(arguments)
    for each in parsed.overrides:
        options.remove(each)
    if (given := parsed.config_dir) is not None:
        options = [option.replace(given, str(user_path(given, "--config-dir"))) for option in options]
    return [*options, *parsed.overrides]


def parse_overrides(arguments: Sequence[str]) -> list[Override]:
    """Return the parsed overrides. Raises JobError with one line for each argument that is not an override."""
    parser = OverridesParser.create()
    overrides, errors = [], []
    for before, argument in zip(("", *arguments), arguments, strict=False):
        try:
            overrides += parser.parse_overrides([argument])
        except OverrideParseException:
            errors.append(_explanation(argument, before))
        except ValueError as error:  # a number with thousands of digits
            errors.append(f"{argument}: {error}")
    if errors:
        raise JobError("\n".join(dict.fromkeys(errors)))
    return overrides


def _explanation(argument: str, before: str) -> str:
    """Return what is wrong with an argument, and an argument that would be right. `before`: the argument before it."""
    name, equals, value = argument.partition("=")
    if not argument.strip():
        return "an argument is empty: write NAME=VALUE (is a variable of the shell not set?)"
    if len(parts := _SEVERAL.split(argument.strip())) > 1:
        separate = " ".join(map(shlex.quote, parts))
        return f"'{argument}' is one argument, because of the quotes: write {len(parts)} arguments, {separate}"
    if not equals:
        if argument in COMMANDS:
            return f"{argument} is a command: write it first, as python -m tpbench {argument} ..."
        if argument in command_line_names() | set(GROUPS):
            return f"{argument} has no value: write {argument}=VALUE"
        several = f"-m {before.rstrip(',')},{argument}" if "=" in before else "-m NAME=VALUE1,VALUE2"
        commands = f"; commands: {', '.join(COMMANDS)}" * (not before)
        meant = "" if before else nearest(argument, COMMANDS)
        return f"'{argument}' has no value{meant} (write NAME=VALUE, or several values as {several}{commands})"
    if (name.strip(), value.strip()) != (name, value):
        return f"'{argument}' has spaces: write {name.strip()}={value.strip()}"
    values = value.split(",")
    if "" in values and any(values):
        given = [each for each in values if each]
        right = f"{name}={given[0]}" if len(given) == 1 else f"-m {name}={','.join(given)}"
        return f"{argument}: a value is missing beside a comma, which no space may follow: write {right}"
    if value.startswith("="):
        return f"{argument} has two equals signs: write {name}={value.lstrip('=')}"
    return (
        f"{argument}: brackets and quotation marks must match, and a value with other characters of special meaning is "
        f"quoted twice: \"{name}='{value}'\""
    )


SLURM_OPTIONS = frozenset(yaml.safe_load((CONF / "hydra/launcher/torchrun_slurm.yaml").read_text())) - {"_target_"}
LAUNCHERS = ("torchrun", "torchrun_slurm", "basic")
MAX_CELLS = 10_000
"""Most cells of one sweep. Every cell is composed before the first one runs, in about 60 ms each."""

_ENVIRONMENT = re.compile(r"\$\{\s*oc\.(env|\$)")
_CODE = "_target_"
"""Key of Hydra's configuration that names a Python object to call."""
MAX_LISTED = 25
"""Most choices of a group that a message lists."""
_ESCAPED = re.compile(r"\\(.)")
"""A character that Hydra escapes in an element of a sweep."""


def check_overrides(arguments: Sequence[str]) -> None:
    """Check every group choice and field name.

    Raises JobError with the valid names, and the most similar one, for each name that does not exist.
    """
    _require_printable(arguments)
    parsed, unrecognised = parse_options(arguments)
    if unrecognised:
        advice = "python -m tpbench --help lists them"
        raise JobError("\n".join(f"no such option: {each} ({advice})" for each in unrecognised))
    overrides = parse_overrides(parsed.overrides)
    _require_safe(overrides)
    folders = config_folders(arguments)
    if parsed.config_name is not None:
        _check_defaults(parsed.config_name.removesuffix(".yaml"), folders)
    errors = [error for each in overrides for error in _errors(each, folders)]
    # An experiment is a sweep without -m.
    if not (parsed.multirun or any(each.key_or_group in ("experiment", "hydra.mode") for each in overrides)):
        errors += [
            f"{each.input_line} is a sweep: add -m (python -m tpbench -m ...)"
            for each in overrides
            if each.is_sweep_override() and not each.key_or_group.startswith("hydra")
        ]
    errors += _launcher_errors(overrides)
    if errors:
        raise JobError("\n".join(dict.fromkeys(errors)))


def check_roots(config: Any, choices: Mapping[str, Any]) -> None:
    """Raise JobError if a configuration file has a group at its root, where it selects no file. `choices`: Hydra's."""
    for group in ("shape", "model", "measure", "experiment"):
        value = config.get(group)
        if isinstance(value, Mapping):
            raise JobError(f"the file of {group}={choices.get(group)} needs `# @package _global_` as its first line")
        if value is not None and value != choices.get(group):
            raise JobError(
                f"`{group}: {value}` at the root of a configuration file selects nothing: write it in the file's "
                f"defaults, as `- {'override ' * (group in choices)}{group}: {value}`"
            )


def check_names(values: Iterable[str]) -> None:
    """Raise JobError for names that configuration files set, and that are no fields. `values`: those of a job."""
    names, where = command_line_names() | set(GROUPS), "python -m tpbench list fields"
    extra = [name for name in values if name not in names | {"hub_ids", "shape_workload"}]
    if errors := [unknown("field", name, names, where) for name in extra]:
        raise JobError("\n".join(f"in a configuration file: {error}" for error in errors))


def _check_defaults(name: str, folders: Sequence[Path]) -> None:
    """Raise JobError if no folder has the configuration file that -cn names, or if it does not build on another one."""
    files = [file for folder in folders if (file := folder / f"{name}.yaml").is_file()]
    if not files:
        valid = sorted(file.stem for folder in folders for file in folder.glob("*.yaml"))
        raise JobError(unknown("configuration file", name, valid))
    if "_self_" not in (read_choice(files[0]).get("defaults") or ()):
        raise JobError(f"{files[0]} needs a list `defaults:` with `- config`, what it overrides, and `- _self_`")


def unknown_choice(group: str, choice: str, valid: Collection[str]) -> str:
    """Return a sentence for a choice that a group does not have."""
    words = re.findall(r"[\w.-]+", choice)
    if len(words) > 1 and set(words) <= set(valid):
        return f"{group}={choice}: write several values as -m {group}={','.join(words)}"
    where = f"python -m tpbench list {group}s" if len(valid) > MAX_LISTED else ""
    folder = "; a path to a local folder with a config.json is valid, too" if group == "model" else ""
    return unknown(group, choice, valid, where) + folder


def _errors(override: Override, folders: Sequence[Path]) -> list[str]:
    key = override.key_or_group
    if key == "hydra/launcher":
        return [unknown("launcher", each, LAUNCHERS) for each in _choices(override) if each not in LAUNCHERS]
    if key.startswith("hydra"):
        if key in OUTPUT_FOLDERS:
            user_path(_choices(override)[0], key)
        return []
    if override.is_delete():
        return [] if key in GROUPS else [f"~{key} deletes a field, which jobs need: give it a value instead"]
    if key not in GROUPS:
        names = command_line_names()
        if key in names:
            return []
        if key == "workload":
            return ["a workload is chosen by its variant and shape (python -m tpbench list WORKLOAD shows them)"]
        if key in SLURM_OPTIONS:
            launcher = "hydra/launcher=torchrun_slurm"
            return [f"{key} is an option of Slurm's launcher: write {launcher} hydra.launcher.{override.input_line}"]
        return [unknown("field", key, names | set(GROUPS), "python -m tpbench list fields")]
    valid = {file.stem for folder in folders for file in (folder / key).glob("*.yaml")}
    named = command_line_variants().values()
    valid |= {each.name if key == "variant" else each.workload for each in named if key == "variant" or each.definition}
    errors = [unknown_choice(key, choice, valid) for choice in _choices(override) if choice not in valid]
    if key == "experiment" and not override.is_add():
        errors.append(f"experiments are added, with a plus: +{str(override.input_line).lstrip('+')}")
    return errors


def _choices(override: Override) -> list[str]:
    if isinstance(override.value(), Glob):
        return []  # matches only names that exist
    discrete = override.is_sweep_override() and override.is_discrete_sweep()
    elements = list(override.sweep_string_iterator()) if discrete else [override.get_value_element_as_str()]
    return [_ESCAPED.sub(r"\1", element.strip("'\"")) for element in elements]


def _launcher_errors(overrides: Sequence[Override]) -> list[str]:
    """Return an error for each option that the chosen launcher does not have. Hydra's would not name the valid ones."""
    chosen = [name for each in overrides if each.key_or_group == "hydra/launcher" for name in _choices(each)[:1]]
    keys = [str(each.key_or_group) for each in overrides]
    names = [key.split(".")[2] for key in keys if key.startswith("hydra.launcher.")]
    if (launcher := ["torchrun", *chosen][-1]) == "torchrun_slurm":
        return [unknown(f"option of {launcher}", name, SLURM_OPTIONS) for name in names if name not in SLURM_OPTIONS]
    return [f"{launcher} has no options: hydra.launcher.{name} needs hydra/launcher=torchrun_slurm" for name in names]


def _require_printable(arguments: Sequence[str]) -> None:
    """Raise JobError for an argument with control characters. Options of Hydra may have line breaks."""
    for argument in arguments:
        rest = "".join(argument.split()) if argument.lstrip("+~").startswith("hydra") else argument
        if not rest.isprintable():
            raise JobError(f"an argument has characters that a terminal does not print: {printable(argument)}")


def _require_safe(overrides: Sequence[Override]) -> None:
    """Raise JobError for overrides that describe too many cells, read the environment or name code."""
    errors = [error for each in overrides for error in _unsafe_parts(each)]
    if errors:
        raise JobError("\n".join(errors))
    if (cells := math.prod(map(_count, overrides))) > MAX_CELLS:
        raise JobError(f"this sweep has {cells} cells; one sweep has at most {MAX_CELLS}: divide it into several")


def _unsafe_parts(override: Override) -> list[str]:
    line, key = str(override.input_line), str(override.key_or_group)
    errors = []
    if _CODE in line:
        errors.append(f"{printable(line)}: {_CODE} names Python code, which the command line may not")
    if _ENVIRONMENT.search(line) and key != "output_dir" and not key.startswith("hydra"):
        # The value would be in messages and in the rows.
        errors.append(f'{printable(line)} reads a variable of the environment: let the shell do it, {key}="$NAME"')
    return errors


def _count(override: Override) -> int:
    """Return the number of values of an override, without making them."""
    value = override.value()
    if isinstance(value, RangeSweep):
        start, stop, step = value.start or 0, value.stop or 0, value.step or 1
        return max(1, math.ceil((stop - start) / step))
    return max(1, len(value.list)) if isinstance(value, ChoiceSweep) else 1
