"""Checks of the command line before Hydra composes anything, so that a typing error gets a useful message.

The names of fields are checked where jobs are made of them (`tpbench.job.parse_job`).
"""

from __future__ import annotations

import math
import re
import shlex
from argparse import Namespace
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, RangeSweep
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from tpbench.launcher.options import COMMANDS, CONF, GROUPS, command_line_names, read_choice
from tpbench.settings import JobError, user_path
from tpbench.suggestions import nearest, printable, unknown

_SEVERAL = re.compile(r"\s+(?=[+~]*[\w./]+=)")
"""White space before another NAME= within one argument."""
_ONE_DASH = re.compile(r"-[a-z_]{3,}")
"""A word after one dash. Hydra's options of one dash have one or two letters."""
_ENVIRONMENT = re.compile(r"\$\{\s*oc\.(env|\$)")
_CODE = "_target_"
"""Key of Hydra's configuration that names a Python object to call."""

OUTPUT_FOLDERS = ("output_dir", "hydra.run.dir", "hydra.sweep.dir")
"""Fields for the folders of rows and of logs."""
MAX_CELLS = 10_000
"""Most cells of one sweep. Every cell is composed before the first one runs, in about 60 ms each."""
MAX_LISTED = 25
"""Most choices of a group that a message lists."""


def parse_options(arguments: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Return Hydra's options with the overrides, and the options that Hydra does not have.

    Raises JobError for an option with a wrong value, or without one that it needs.
    """
    for each in arguments:
        if _ONE_DASH.match(each):  # argparse would take the first letter for an option, such as -m
            raise JobError(f"{each}: a field has no dash in front ({each[1:]}), and a long option of Hydra has two")
    parser = get_args_parser()

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


def check_overrides(arguments: Sequence[str]) -> None:
    """Raise JobError with a line for each argument that Hydra would not understand, or that must not reach it."""
    for argument in arguments:  # options of Hydra may have line breaks
        rest = "".join(argument.split()) if argument.lstrip("+~").startswith("hydra") else argument
        if not rest.isprintable():
            raise JobError(f"an argument has characters that a terminal does not print: {printable(argument)}")
    parsed, unrecognised = parse_options(arguments)
    errors = [f"no such option: {each} (python -m tpbench --help lists them)" for each in unrecognised]
    overrides = parse_overrides(parsed.overrides)
    # An experiment is a sweep without -m.
    sweeps = parsed.multirun or any(each.key_or_group in ("experiment", "hydra.mode") for each in overrides)
    errors += [error for each in overrides for error in _errors(each, sweeps)]
    if errors:
        raise JobError("\n".join(dict.fromkeys(errors)))
    if (cells := math.prod(map(_count, overrides))) > MAX_CELLS:
        raise JobError(f"this sweep has {cells} cells; one sweep has at most {MAX_CELLS}: divide it into several")


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
    values = [each.strip() for each in value.lstrip("=").split(",")]
    right = f"{'-m ' * (len(list(filter(None, values))) > 1)}{name.strip()}={','.join(filter(None, values))}"
    if any(values) and right.removeprefix("-m ") != argument:
        return f"{argument}: a value has no space around it, no comma at its end and one equals sign: write {right}"
    return (
        f"{argument}: brackets and quotation marks must match, and a value with other characters of special meaning is "
        f"quoted twice: \"{name}='{value}'\""
    )


def _errors(override: Override, sweeps: bool) -> list[str]:
    """Return what is wrong with an override. `sweeps`: its command line may have several values of a name."""
    line, key, errors = str(override.input_line), str(override.key_or_group), []
    of_hydra = key.startswith("hydra")
    if _CODE in line:
        errors.append(f"{printable(line)}: {_CODE} names Python code, which the command line may not")
    if _ENVIRONMENT.search(line) and key != "output_dir" and not of_hydra:
        # The value would be in messages and in the rows.
        errors.append(f'{printable(line)} reads a variable of the environment: let the shell do it, {key}="$NAME"')
    if override.is_sweep_override() and not (sweeps or of_hydra):
        errors.append(f"{line} is a sweep: add -m (python -m tpbench -m ...)")
    if key == "workload":
        errors.append("a workload is chosen by its variant and shape (python -m tpbench list WORKLOAD shows them)")
    if key in OUTPUT_FOLDERS and of_hydra:
        user_path(override.get_value_element_as_str().strip("'\""), key)
    if key in GROUPS and isinstance(values := override.value(), list):
        errors.append(f"{line}: write several values as -m {key}={','.join(map(str, values))}")
    if key == "experiment" and not override.is_add():
        errors.append(f"experiments are added, with a plus: +{line.lstrip('+')}")
    return errors


def _count(override: Override) -> int:
    """Return the number of values of an override, without making them."""
    value = override.value()
    if isinstance(value, RangeSweep):
        start, stop, step = value.start or 0, value.stop or 0, value.step or 1
        return max(1, math.ceil((stop - start) / step))
    return max(1, len(value.list)) if isinstance(value, ChoiceSweep) else 1


def hydra_message(error: HydraException) -> str:
    """Return an error of Hydra's for the user, with the valid names if a choice or an option does not exist."""
    if isinstance(error, MissingConfigException) and "/" in str(error.missing_cfg_file):
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        return unknown_choice(group.rpartition("/")[2], choice, set(error.options or ()) - {"basic"})
    match = re.search(r"Could not override 'hydra\.launcher\.(\w+)", str(error))
    valid = read_choice(CONF / "hydra/launcher/torchrun_slurm.yaml").keys() - {_CODE}
    if match and match[1] in valid:
        return f"hydra.launcher.{match[1]} needs hydra/launcher=torchrun_slurm"
    if match:
        return unknown("option of torchrun_slurm", match[1], valid)
    return f"{error}\n{error.__cause__}" if isinstance(error.__cause__, OmegaConfBaseException) else str(error)


def unknown_choice(group: str, choice: str, valid: Collection[str]) -> str:
    """Return a sentence for a choice that a group does not have."""
    where = f"python -m tpbench list {group}s" if len(valid) > MAX_LISTED else ""
    folder = "; a path to a local folder with a config.json is valid, too" if group == "model" else ""
    return unknown(group, choice, valid, where) + folder


def check_roots(config: Any, choices: Mapping[str, Any]) -> None:
    """Raise JobError if a configuration file has a group at its root, where it selects no file. `choices`: Hydra's."""
    for group in ("shape", "model", "measure", "experiment"):
        if config.get(group) not in (None, choices.get(group)):
            raise JobError(
                f"`{group}:` at the root of a configuration file selects nothing: write "
                f"`- {'override ' * (group in choices)}{group}: NAME` in its defaults, and `# @package _global_` as "
                f"the first line of the file of {group}=NAME"
            )


def check_names(values: Iterable[str]) -> None:
    """Raise JobError for names that configuration files set, and that are no fields. `values`: those of a job."""
    names, where = command_line_names() | set(GROUPS), "python -m tpbench list fields"
    extra = [name for name in values if name not in names | {"hub_ids", "shape_workload"}]
    if errors := [unknown("field", name, names, where) for name in extra]:
        raise JobError("\n".join(f"in a configuration file: {error}" for error in errors))
