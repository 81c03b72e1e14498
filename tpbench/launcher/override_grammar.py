"""Parse overrides one by one, and explain an argument that Hydra's grammar does not accept."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import OverrideParseException

from tpbench.settings import JobError, nearest

COMMANDS = ("list", "doctor", "new")
"""Words that may stand in place of overrides, as the first argument."""

_SEVERAL = re.compile(r"\s+(?=[+~]*[\w./]+=)")
"""White space before another NAME= within one argument."""
_PAIRS = {"[": "]", "{": "}", "(": ")"}


def parse_overrides(arguments: Sequence[str]) -> list[Override]:
    """Return the parsed overrides. Raises JobError with one line for each argument that is not an override."""
    parser = OverridesParser.create()
    overrides, errors = [], []
    for index, argument in enumerate(arguments):
        try:
            overrides += parser.parse_overrides([argument])
        except OverrideParseException:
            errors.append(_explanation(argument, first=index == 0))
        except ValueError as error:  # a number with thousands of digits
            errors.append(f"{argument}: {error}")
    if errors:
        raise JobError("\n".join(dict.fromkeys(errors)))
    return overrides


def _explanation(argument: str, first: bool) -> str:
    """Return what is wrong with an argument, and an argument that would be right."""
    name, equals, value = argument.partition("=")
    if not argument.strip():
        return "an argument is empty: write NAME=VALUE (is a variable of the shell not set?)"
    if len(parts := _SEVERAL.split(argument.strip())) > 1:
        separate = " ".join(map(shlex.quote, parts))
        return f"'{argument}' is one argument, because of the quotes: write {len(parts)} arguments, {separate}"
    if not equals:
        meant = nearest(argument, COMMANDS) if first else ""
        return (
            f"Error parsing override '{argument}': it has no value{meant} "
            "(write NAME=VALUE or, with -m, NAME=VALUE1,VALUE2)"
        )
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
