"""Checks of the command line before Hydra composes anything, so that a typing error gets a useful message."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import yaml
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override, RangeSweep

from tpbench.launcher.command_line.grammar import parse_options, parse_overrides
from tpbench.launcher.command_line.rewrites import command_line_variants
from tpbench.launcher.options import GROUPS, command_line_names, example_values
from tpbench.settings import JobError
from tpbench.suggestions import printable, unknown

LAUNCHERS = ("torchrun", "torchrun_slurm", "basic")
MAX_CELLS = 10_000
"""Most cells of one sweep. Every cell is composed before the first one runs, in 2 to 20 ms each."""

_ENVIRONMENT = re.compile(r"\$\{\s*oc\.(env|\$)")
_CODE = "_target_"
"""Key of Hydra's configuration that names a Python object to call."""
MAX_LISTED = 25
"""Most choices of a group that a message lists."""
_ESCAPED = re.compile(r"\\(.)")
"""A character that Hydra escapes in an element of a sweep."""


def check_overrides(arguments: Sequence[str], conf: Path) -> None:
    """Check every group choice and field name.

    Raises JobError with the valid names, and the most similar one, for each name that does not exist.
    """
    if quoted := [each for each in arguments if each.startswith(("-m ", "--multirun "))]:
        raise JobError(f"'{quoted[0]}' is one argument, because of the quotes: write {quoted[0]} without them")
    _require_printable(arguments)
    parsed, unrecognised = parse_options(arguments)
    names = example_values()
    if unrecognised:
        raise JobError("\n".join(_no_option(each, names) for each in unrecognised))
    overrides = parse_overrides(parsed.overrides, names)
    _require_safe(overrides)
    folders = [conf, *([Path(parsed.config_dir)] if parsed.config_dir else [])]
    errors = [error for each in overrides for error in _errors(each, folders)]
    # An experiment is a sweep without -m.
    if not (parsed.multirun or any(each.key_or_group in ("experiment", "hydra.mode") for each in overrides)):
        errors += [
            f"{each.input_line} is a sweep: add -m (python -m tpbench -m ...)"
            for each in overrides
            if each.is_sweep_override() and not each.key_or_group.startswith("hydra")
        ]
    errors += _launcher_errors(overrides, conf)
    if errors:
        raise JobError("\n".join(dict.fromkeys(errors)))


def _no_option(option: str, names: Mapping[str, str]) -> str:
    name, _, value = option.lstrip("-").partition("=")
    if (field := name.replace("-", "_")) in names:
        return f"{option}: fields have no dashes in front, write {field}={value or names[field]}"
    return f"no such option: {option} (python -m tpbench --help lists them)"


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
    if key.startswith("hydra") or override.is_delete():
        return []
    if key not in GROUPS:
        names = command_line_names()
        if key in names:
            return []
        if key in _launcher_options(folders[0], "torchrun_slurm"):
            launcher = "hydra/launcher=torchrun_slurm"
            return [f"{key} is an option of Slurm's launcher: write {launcher} hydra.launcher.{override.input_line}"]
        return [unknown("field", key, names | set(GROUPS), "python -m tpbench list fields")]
    valid = {file.stem for folder in folders for file in (folder / key).glob("*.yaml")}
    valid |= command_line_variants().keys() if key == "variant" else set()
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


def _launcher_errors(overrides: Sequence[Override], conf: Path) -> list[str]:
    """Return an error for each option that the chosen launcher does not have. Hydra's would not name the valid ones."""
    chosen = [name for each in overrides if each.key_or_group == "hydra/launcher" for name in _choices(each)[:1]]
    launcher = chosen[-1] if chosen else "torchrun"
    if not (conf / "hydra" / "launcher" / f"{launcher}.yaml").exists():
        return []
    valid = _launcher_options(conf, launcher)
    keys = [str(each.key_or_group) for each in overrides]
    names = [key.split(".")[2] for key in keys if key.startswith("hydra.launcher.")]
    if not valid:
        return [
            f"{launcher} has no options: hydra.launcher.{name} needs hydra/launcher=torchrun_slurm" for name in names
        ]
    return [unknown(f"option of {launcher}", name, valid) for name in names if name not in valid]


def _launcher_options(conf: Path, launcher: str) -> list[str]:
    """Return the names of a launcher's options, from its file."""
    file = conf / "hydra" / "launcher" / f"{launcher}.yaml"
    return [name for name in yaml.safe_load(file.read_text()) if not name.startswith("_")] if file.exists() else []


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
