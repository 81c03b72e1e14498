"""The conditions of `--only NAME=VALUE`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tpbench.settings import JobError


def parse_conditions(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Return name and value of each condition. Raises JobError with the right line for one without an equals sign."""
    for name, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        if "=" not in name:
            value = "" if "=" in following else following
            right = f"{name}={value or 'VALUE'}"
            raise JobError(f"--only {f'{name} {value}'.strip()}: the equals sign is missing: write --only {right}")
    return [(name, value) for name, _, value in (each.partition("=") for each in arguments)]


def values_of(text: str, present: set[str]) -> list[str]:
    """Return the values that a condition names: the whole text if rows have it, else its parts between commas."""
    return [text] if text in present or "," not in text else text.split(",")
