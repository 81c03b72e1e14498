"""Typed settings: dataclass fields with their help, limits and former names. `parse` checks values against them."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from tpbench.suggestions import nearest


class JobError(ValueError):
    """The configuration is invalid. The message is for the user."""


def setting(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    low: float | None = None,
    high: float | None = None,
    former_name: str = "",
    former_values: Mapping[str, str] | None = None,
    added: bool = False,
) -> Any:
    """Return a dataclass field with one line of help and, for numbers, inclusive limits.

    `former_name` and `former_values` (old to new) stay valid wherever the field is set. A job's key is computed with
    them, so that it stays equal to the key of rows from before the renaming.

    `added`: rows from before this field existed have no value of it. Its default must be what those rows did. A job's
    key leaves the field out while it has its default, so that it stays equal to the key of those rows.
    """
    metadata = {
        "help": help,
        "low": low,
        "high": high,
        "former_name": former_name,
        "former_values": former_values or {},
        "added": added,
    }
    return dataclasses.field(default=default, metadata=metadata)


def former_names(cls: type) -> dict[str, str]:
    """Return the former names of the class's fields, each with the present name."""
    return {
        each.metadata["former_name"]: each.name for each in dataclasses.fields(cls) if each.metadata.get("former_name")
    }


def added_defaults(cls: type) -> dict[str, Any]:
    """Return the fields that were added later, each with its default."""
    return {each.name: each.default for each in dataclasses.fields(cls) if each.metadata.get("added")}


def former_spelling(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values under the former names, with former values, where the class's fields have such."""
    renamed = {each.name: each.metadata for each in dataclasses.fields(cls) if each.metadata.get("former_name")}
    spelled = {}
    for name, value in values.items():
        if name in renamed:
            former = {new: old for old, new in renamed[name]["former_values"].items()}
            name, value = renamed[name]["former_name"], former.get(value, value)
        spelled[name] = value
    return spelled


def spelled(value: Any) -> str:
    """Return a value as a command line spells it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def parse(cls: type, values: Mapping[str, Any]) -> Any:
    """Build the settings dataclass `cls` from plain values, each checked against its field's type and limits.

    Values may be strings, as a command line has them ("64", "true", "null"), and names and values may be former ones.
    A mapping for a field of type str becomes JSON.

    Raises:
        JobError: it names every invalid value and what would be valid.
    """
    hints = typing.get_type_hints(cls)
    complaints, parsed = [], {}
    for each in dataclasses.fields(cls):
        former: str = each.metadata.get("former_name", "")
        name = former if former in values else each.name
        if name not in values:
            if each.default is dataclasses.MISSING:
                complaints.append(f"{each.name} is missing ({each.metadata['help']})")
            continue
        if name != each.name and str(values.get(each.name, each.default)) != str(each.default):
            complaints.append(f"{former} is the former name of {each.name}: set one of them")
        try:
            parsed[each.name] = _coerce(each, hints[each.name], values[name])
        except JobError as error:
            complaints.append(str(error))
    if complaints:
        raise JobError("\n".join(complaints))
    return cls(**parsed)


def _coerce(each: dataclasses.Field[Any], hint: Any, value: Any) -> Any:
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if type(None) in kinds:
        if value is None or value in ("null", "none", "None"):
            return None
        kinds = tuple(kind for kind in kinds if kind is not type(None))
    (kind,) = kinds
    value = each.metadata.get("former_values", {}).get(str(value), value)
    if typing.get_origin(kind) is typing.Literal:
        for choice in typing.get_args(kind):
            if (type(value) is type(choice) and value == choice) or str(value) == str(choice):
                return choice
        valid = [str(choice) for choice in typing.get_args(kind)]
        raise JobError(
            f"{each.name}={spelled(value)} does not exist{nearest(str(value), valid)} (valid: {', '.join(valid)})"
        )
    if kind is bool:
        answer = {"true": True, "false": False}.get(str(value).lower())
        if answer is None:
            raise JobError(f"{each.name}={spelled(value)} must be true or false")
        return answer
    if kind is str:
        return json.dumps(value) if isinstance(value, Mapping) else str(value)
    return _number(each, kind, value)


def _number(each: dataclasses.Field[Any], kind: type, value: Any) -> int | float:
    name, low, high = each.name, each.metadata["low"], each.metadata["high"]
    noun = "a whole number" if kind is int else "a number"
    try:
        number: int | float = kind(value)
        if isinstance(value, bool) or number != float(value) or not math.isfinite(number):  # true, 2.5 tokens, NaN
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise JobError(f"{name}={spelled(value)} must be {noun} ({each.metadata['help']})") from None
    if (low is not None and number < low) or (high is not None and number > high):
        limits = (
            f"between {low} and {high}"
            if None not in (low, high)
            else f"at least {low}"
            if high is None
            else f"at most {high}"
        )
        raise JobError(f"{name}={spelled(value)} must be {limits} ({each.metadata['help']})")
    return number
