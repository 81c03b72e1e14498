"""Typed settings: dataclass fields with their help and limits. `parse` checks values against them."""

import argparse
import dataclasses
import math
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, Literal

from tpbench.suggestions import nearest


class JobError(ValueError, argparse.ArgumentTypeError):
    """The configuration is invalid. The message is for the user, and a parser of arguments prints it, too."""

    exit_code = 2


class SweepError(JobError):
    """A sweep has begun, and its cells failed or could not be stored."""

    exit_code = 1


def job_error(error: BaseException | None) -> JobError | None:
    """Return the JobError that caused another error, or None: OmegaConf wraps those that its resolvers raise."""
    while error:
        if isinstance(error, JobError):
            return error
        error = error.__cause__ or error.__context__
    return None


def setting(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    low: float | None = None,
    high: float | None = None,
    option: Literal["", "ignored", "skipped"] = "",
    with_graph: Any = dataclasses.MISSING,
    column: bool = True,
    in_key: Any = dataclasses.MISSING,
) -> Any:
    """Return a dataclass field with one line of help and, for numbers, inclusive limits.

    Args:
        default: its default. Without one, the field needs a value.
        help: its meaning, also that of its column.
        low: the smallest valid number.
        high: the largest valid number.
        option: only some variants have the field. With another variant the value is `ignored`, so that the field has
            its default, or the cell is `skipped`.
        with_graph: the value that replaces an option's default with `graph=true`.
        column: false if a row has the value in the JSON of its job only.
        in_key: the value in every job's key, if the field cannot change a result.
    """
    traits = {"option": option, "with_graph": with_graph, "column": column, "in_key": in_key}
    return dataclasses.field(default=default, metadata={"help": help, "low": low, "high": high, **traits})


def field_traits(cls: type, trait: str) -> dict[str, Any]:
    """Return the fields of a settings dataclass that have this argument of `setting`, each with its value."""
    values = {field.name: field.metadata.get(trait, "") for field in dataclasses.fields(cls)}
    return {name: value for name, value in values.items() if value not in ("", dataclasses.MISSING)}


def defaults(cls: type) -> dict[str, Any]:
    """Return the fields that have a default, each with that default."""
    return {field.name: field.default for field in dataclasses.fields(cls) if field.default is not dataclasses.MISSING}


def spelled(value: Any) -> str:
    """Return a value as a command line spells it, with all digits that tell it from others."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, float):
        return str(value)
    return short if float(short := f"{value:g}") == value else repr(float(value))


def parse(cls: type, values: Mapping[str, Any]) -> Any:
    """Build the settings dataclass `cls` from plain values, each checked against its field's type and limits.

    Values may be strings, as a command line has them ("64", "128k", "1M", "true", "null"). 128k is 131072. Raises
    JobError, which names every invalid value and what would be valid.
    """
    hints = typing.get_type_hints(cls)
    complaints, parsed = [], {}
    for field in dataclasses.fields(cls):
        try:
            if field.name in values:
                parsed[field.name] = checked_value(field, hints[field.name], values[field.name])
            elif field.default is dataclasses.MISSING:
                raise JobError(f"{field.name} is missing ({field.metadata['help']})")
        except JobError as error:
            complaints.append(str(error))
    if complaints:
        raise JobError("\n".join(complaints))
    return cls(**parsed)


def is_text(hint: Any) -> bool:
    """Return True if a field of that type holds a text, a choice or a path, or perhaps nothing."""
    return all(kind is str or typing.get_origin(kind) is typing.Literal for kind in kinds_of(hint) - {type(None)})


def kinds_of(hint: Any) -> set[Any]:
    """Return the types that a field may have: those of a union, such as `int | None`, or the hint itself."""
    return {*typing.get_args(hint)} if typing.get_origin(hint) in (typing.Union, types.UnionType) else {hint}


def checked_value(field: dataclasses.Field[Any], hint: Any, value: Any) -> Any:
    """Return the value of a field of that type. Raises JobError if it doesn't fit the type or the limits."""
    kinds = kinds_of(hint)
    if type(None) in kinds and (value is None or value in ("null", "none", "None")):
        return None
    (kind,) = kinds - {type(None)}
    if typing.get_origin(kind) is typing.Literal:
        choices = {spelled(choice): choice for choice in typing.get_args(kind)}
        if (text := spelled(value)) not in choices:
            raise JobError(f"{field.name}={text} does not exist{nearest(text, choices)} (valid: {', '.join(choices)})")
        return choices[text]
    if kind is bool:
        answer = {"true": True, "false": False}.get(str(value).lower())
        if answer is None:
            raise JobError(f"{field.name}={spelled(value)} must be true or false")
        return answer
    if kind is str:
        if isinstance(value, (list, Mapping)):
            raise JobError(f"{field.name}={spelled(value)} must be one text ({field.metadata['help']})")
        return spelled(value) if value is None or isinstance(value, bool) else str(value)
    return _number(field, kind, value)


def _number(field: dataclasses.Field[Any], kind: type, value: Any) -> int | float:
    name, low, high = field.name, field.metadata["low"], field.metadata["high"]
    noun = "a whole number" if kind is int else "a number"
    if value is None:
        raise JobError(f"{name} has no value: write {name}=VALUE, {noun} ({field.metadata['help']})")
    if kind is int and re.fullmatch(r"\d{1,9}[kKmM]", str(value)):
        value = int(value[:-1]) * 1024 ** " km".index(value[-1].lower())
    try:
        number: int | float = kind(value)
        if isinstance(value, bool) or number != float(value) or not math.isfinite(number):  # true, 2.5 tokens, NaN
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        noun = "below 2^53" if kind is int and str(value).isdigit() else noun  # exact as a float, too
        raise JobError(f"{name}={spelled(value)} must be {noun} ({field.metadata['help']})") from None
    if (low is not None and number < low) or (high is not None and number > high):
        limits = [f"at {word} {limit}" for word, limit in (("least", low), ("most", high)) if limit is not None]
        raise JobError(f"{name}={spelled(value)} must be {' and '.join(limits)} ({field.metadata['help']})")
    return number


def user_path(path: object, name: str = "a path") -> Path:
    """Return a path that a user gave, with ~ as the home folder. Every command takes its paths through this function.

    Raises JobError, with the name of the field, for a path that is empty or null, that isn't text, such as a list and
    1e3, or that is in the home of nobody.
    """
    if isinstance(path, bool) or not isinstance(path, (str, int, PurePath, type(None))):
        kind = type(path).__name__
        raise JobError(f"{name}={path} is of the type {kind}, not a path: Hydra needs quotes, as \"{name}='...'\"")
    text = "" if path is None else str(path)
    if not text.strip() or text in ("null", "None"):
        raise JobError(f"{name} is empty (is a variable of the shell not set?)")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise JobError(f"{name}={text}: {text.partition('/')[0]} isn't the home of a user") from None
