"""Rewrites of the command line before Hydra parses it. They exist because Hydra has no setting for them."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser

from tpbench.job import field_aliases
from tpbench.launcher.command_line.grammar import parse_options
from tpbench.launcher.command_line.model_ids import file_of
from tpbench.launcher.options import GROUPS, command_line_names
from tpbench.workloads import workloads

_GROUP_CHOICE = re.compile(rf"[+~]?(?:{'|'.join(GROUPS)})=")
_NESTED = re.compile(r"""[()\[\]{}'"\\]""")
"""Characters of a value that is more than a list of words."""
_OVERRIDE = re.compile(r"([+~]*)(\w+)")
_BARE_NUMBER = re.compile(r"(?<![\w'\".])(\d+)(?![\w'\".])")


def options_first(arguments: Sequence[str]) -> list[str]:
    """Return Hydra's options, such as -m, and after them all overrides.

    Hydra's own parser rejects overrides after an option that itself stands after an override.
    """
    overrides = parse_options(arguments)[0].overrides
    options = list(arguments)
    for each in overrides:
        options.remove(each)
    return [*options, *overrides]


def quote_numbers(arguments: Sequence[str]) -> list[str]:
    """Quote numbers that name a choice: `block_cap=4096` becomes `block_cap='4096'`.

    Hydra accepts only strings as the name of a choice.
    """
    return [_BARE_NUMBER.sub(r"'\1'", each) if _GROUP_CHOICE.match(each) else each for each in arguments]


def flat_names(arguments: Sequence[str]) -> list[str]:
    """Write `train.loss=tpbench` as `train_loss=tpbench`, aliases as names, and folders as `model_dir`."""
    flat = []
    for argument in without_aliases(arguments):
        name, equals, value = argument.partition("=")
        if name == "model" and "/" in value:
            flat += _model_and_folders(value)
        elif name.replace(".", "_") in command_line_names():
            flat.append(f"{name.replace('.', '_')}{equals}{value}")
        else:
            flat.append(argument)
    return flat


def _model_and_folders(value: str) -> list[str]:
    """Return the overrides that `model=VALUE` stands for, if VALUE has an id of Hugging Face or a path to a folder.

    The id `Qwen/Qwen3-8B` becomes `model=qwen3_8b`. A folder, and an id without a file in conf/model, becomes a
    `model_dir`: `NAME,path/to/folder` becomes `model=NAME` and `model_dir=null,path/to/folder`. With several names each
    folder is combined with each name. The resulting equal jobs run once.
    """
    choices = [value] if _NESTED.search(value) else value.split(",")
    choices = [file_of(choice) or choice for choice in choices]
    names = [choice for choice in choices if "/" not in choice]
    folders = [choice for choice in choices if "/" in choice]
    overrides = [f"model={','.join(names)}"] if names else []
    return [*overrides, f"model_dir={','.join(['null'] * bool(names) + folders)}"] if folders else overrides


def without_aliases(arguments: Iterable[str]) -> list[str]:
    """Replace the aliases of fields by the fields' names."""
    aliases = field_aliases()

    def renamed(argument: str) -> str:
        match = _OVERRIDE.match(argument)
        return f"{match[1]}{aliases[match[2]]}{argument[match.end() :]}" if match and match[2] in aliases else argument

    return [renamed(argument) for argument in arguments]


def force_fields(arguments: Sequence[str]) -> list[str]:
    """Write `width=64` as `++width=64`, for fields that only some workloads have.

    In a sweep over variants Hydra first composes a job of the default variant, which may not have the field.
    """
    forced = _fields_of_some_workloads() - set(GROUPS)
    return [f"++{each}" if each.partition("=")[0] in forced else each for each in arguments]


def chosen_fields(overrides: Sequence[str]) -> list[str]:
    """Return the names that these overrides of one job set: fields, and groups of only some workloads, such as loss."""
    keys = [each.key_or_group for each in OverridesParser.create().parse_overrides(list(overrides))]
    groups = set(GROUPS) - _fields_of_some_workloads()
    return [key for key in keys if key not in groups and not key.startswith("hydra")]


@functools.cache
def _fields_of_some_workloads() -> frozenset[str]:
    shared: set[str] = set.intersection(*map(command_line_names, workloads().values()))
    return frozenset(command_line_names() - shared)
