"""Parse the command line, and explain an argument that Hydra's grammar does not accept."""

from __future__ import annotations

import re
import shlex
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NoReturn

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import OverrideParseException

from tpbench.launcher.hydra_internals import options_parser
from tpbench.settings import JobError
from tpbench.suggestions import nearest

COMMANDS = ("list", "doctor", "new")
"""Words that may stand in place of overrides, as the first argument."""

_SEVERAL = re.compile(r"\s+(?=[+~]*[\w./]+=)")
"""White space before another NAME= within one argument."""
_ONE_DASH = re.compile(r"-[a-z_]{3,}")
"""A word after one dash. Hydra's options of one dash have one or two letters."""
_PAIRS = {"[": "]", "{": "}", "(": ")"}


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


def parse_overrides(arguments: Sequence[str], names: Mapping[str, str] = MappingProxyType({})) -> list[Override]:
    """Return the parsed overrides. `names`: what may stand before an equals sign, with a value, for the messages.

    Raises JobError with one line for each argument that is not an override.
    """
    parser = OverridesParser.create()
    overrides, errors = [], []
    index = 0
    while index < len(arguments):
        pieces = _pieces(arguments[index:], names)
        argument, before = arguments[index], arguments[index - 1] if index else ""
        index += len(pieces)
        if len(pieces) > 1:
            errors.append(f"'{' '.join(pieces)}' has spaces: write {_joined(pieces)}")
            continue
        try:
            overrides += parser.parse_overrides([argument])
        except OverrideParseException:
            errors.append(_explanation(argument, before, names))
        except ValueError as error:  # a number with thousands of digits
            errors.append(f"{argument}: {error}")
    if errors:
        raise JobError("\n".join(dict.fromkeys(errors)))
    return overrides


def _pieces(arguments: Sequence[str], names: Collection[str]) -> Sequence[str]:
    """Return the first arguments that seem to be one override with spaces, such as `tokens=64, 128` or `tokens 64`."""
    count = 1
    if arguments[0].rstrip(":=") in names:
        count += arguments[1:2] == ["="]
        count += any("=" not in each for each in arguments[count : count + 1])
    while count < len(arguments) and "=" not in arguments[count] and arguments[count - 1].endswith(","):
        count += 1
    return arguments[:count]


def _joined(pieces: Sequence[str]) -> str:
    name, _, value = pieces[0].partition("=")
    return f"{name.rstrip(':')}={value}{''.join(pieces[1:]).removeprefix('=')}"


def _explanation(argument: str, before: str, names: Mapping[str, str]) -> str:
    """Return what is wrong with an argument, and an argument that would be right. `before`: the argument before it."""
    name, equals, value = argument.partition("=")
    if not argument.strip():
        return "an argument is empty: write NAME=VALUE (is a variable of the shell not set?)"
    if len(parts := _SEVERAL.split(argument.strip())) > 1:
        separate = " ".join(map(shlex.quote, parts))
        return f"'{argument}' is one argument, because of the quotes: write {len(parts)} arguments, {separate}"
    if not equals:
        if argument in names:
            return f"{argument} has no value: write {argument}={names[argument]}"
        several = f"-m {before},{argument}" if "=" in before else "-m NAME=VALUE1,VALUE2"
        commands = f"; commands: {', '.join(COMMANDS)}" * (not before)
        meant = "" if before else nearest(argument, COMMANDS)
        return f"'{argument}' has no value{meant} (write NAME=VALUE, or several values as {several}{commands})"
    if (name.strip(), value.strip()) != (name, value):
        return f"'{argument}' has spaces: write {name.strip()}={value.strip()}"
    values = value.split(",")
    if "" in values and any(values):
        given = [each for each in values if each]
        right = f"{name}={given[0]}" if len(given) == 1 else f"-m {name}={','.join(given)}"
        return f"{argument}: a value is missing beside a comma: write {right}"
    if opened := [pair for pair in _PAIRS.items() if value.count(pair[0]) != value.count(pair[1])]:
        return f"{argument}: {opened[0][0]} and {opened[0][1]} do not match"
    if value.count("'") % 2 or value.count('"') % 2:
        return f"{argument}: a quotation mark is not closed"
    if value.startswith("="):
        return f"{argument} has two equals signs: write {name}={value.lstrip('=')}"
    return f"{argument}: the value has characters with a special meaning: quote it twice, \"{name}='{value}'\""
