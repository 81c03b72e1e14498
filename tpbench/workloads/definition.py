"""The definition of a workload from a user's file: plain data in rows, so that reports never load the file."""

import contextlib
import dataclasses
import functools
import inspect
import json
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from tpbench.columns import declared
from tpbench.settings import checked_value, kinds_of, setting
from tpbench.workloads import NAMES, Workload, register, workloads

_TYPES: dict[str, Any] = {"int": int, "float": float, "str": str, "bool": bool}
_BROKEN = (ValueError, TypeError, KeyError, AttributeError, RecursionError)


def definition_of(workload: Workload) -> dict[str, Any]:
    """Return what rows carry. Raises ValueError in one line for a field that a command line could not set."""
    hints = typing.get_type_hints(workload.problem)
    columns = {column.name: column.doc for column in declared(workload.columns)}
    code = getattr(inspect.unwrap(next(iter(workload.functions.values()), definition_of)), "__code__", None)
    file = Path(code.co_filename) if code else None
    return {
        "name": workload.name,
        "file": file.name if file else "",
        **({"path": _path_in_checkout(file)} if file else {}),
        "title": workload.summary,
        "costs": not workload.functions.keys().isdisjoint(("costs", "session")),
        "fields": [_field(field, hints[field.name]) for field in dataclasses.fields(workload.problem)],
        **({"columns": columns} if columns else {}),
        **({"scheduled": True} if "session" in workload.functions else {}),
    }


def _path_in_checkout(file: Path) -> str:
    """Return the path from the root of the file's git repository, equal in all checkouts, or else the whole path."""
    root = next((folder for folder in file.parents if (folder / ".git").exists()), None)
    return (file.relative_to(root) if root else file).as_posix()


def _field(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    if "help" not in field.metadata:
        raise ValueError(f'the field {field.name} has no help: write {field.name} = setting(DEFAULT, help="...")')
    traits = {"option": "", "with_graph": dataclasses.MISSING, "column": True, "in_key": dataclasses.MISSING}
    for trait, default in traits.items():
        if field.metadata[trait] != default:
            raise ValueError(f"the field {field.name} has {trait}, which is for workloads of tpbench: leave it out")
    kinds = [*kinds_of(hint) - {type(None)}]
    choices = typing.get_args(kinds[0]) if typing.get_origin(kinds[0]) is Literal else ()
    if len(kinds) > 1 or not (kinds[0] in _TYPES.values() or choices):
        raise ValueError(f"the field {field.name} must be an int, float, str, bool or Literal, or one of them or None")
    has_default = field.default is not dataclasses.MISSING
    given = {"default": checked_value(field, hint, field.default)} if has_default else {}
    return {
        "name": field.name,
        "type": list(choices) or kinds[0].__name__,
        "null": type(None) in kinds_of(hint),
        **given,
        **{key: field.metadata[key] for key in ("help", "low", "high")},
    }


def known(definition: Mapping[str, Any]) -> Workload:
    """Register the workload of a definition, without functions and variants. Raises one of `_BROKEN` for other data."""
    present = workloads().get(str(definition.get("name")))
    if present is None or present.definition != definition:
        register(present := _made(definition))
    return present


def _made(definition: Mapping[str, Any]) -> Workload:
    if definition["name"] in NAMES or not definition["name"].isidentifier():
        raise ValueError(f"{definition['name']} is the name of a workload of tpbench")
    fields = []
    for entry in definition["fields"]:
        kind = Literal[tuple(entry["type"])] if isinstance(entry["type"], list) else _TYPES[entry["type"]]
        default = {"default": entry["default"]} if "default" in entry else {}
        made = setting(**default, help=str(entry["help"]), low=entry["low"], high=entry["high"])
        fields.append((entry["name"], kind | None if entry["null"] else kind, made))
    problem = dataclasses.make_dataclass(
        str(definition["name"]), fields, frozen=True, namespace={"check": lambda self, tp_size, dp_size: []}
    )
    return Workload(
        problem,
        str(definition["title"]),
        name=definition["name"],
        columns=declared(dict(definition.get("columns", {}))),
        headline=tuple(name for name, *_ in fields if name != "seed"),
        scheduled=definition.get("scheduled") is True,
        definition=definition,
    )


def workload_of(row: Mapping[str, Any]) -> Workload | None:
    """Return the workload of a row, or None for one that this process doesn't know.

    A user may edit an operation, and two files may use one name. If the row's form has a field that the registered one
    lacks, or is of another file, its problem is another one: its own form is returned.
    """
    present = workloads().get(row["workload"])
    if present is None or present.definition is None:
        return present
    with contextlib.suppress(*_BROKEN):  # it may be any text
        own = _stored(row["workload_definition"])
        if own.name == present.name and not _extends(present.definition, own.definition or {}):
            return own
    return present


@functools.lru_cache(1000)
def _stored(text: str) -> Workload:
    return _made(json.loads(text))


def _extends(definition: Mapping[str, Any], older: Mapping[str, Any]) -> bool:
    """Return true if the definition has the fields of the older one, and further ones with defaults only."""
    names = {field["name"] for field in older["fields"]}
    added = [field for field in definition["fields"] if field["name"] not in names]
    extends = len(names) + len(added) == len(definition["fields"]) and all("default" in field for field in added)
    # Rows of older versions have no path, or no file.
    places = ({text for text in (definition.get(name), older.get(name)) if text} for name in ("file", "path"))
    return extends and all(len(texts) < 2 for texts in places)


def register_stored(definitions: Iterable[Any]) -> None:
    """Register the workloads of rows, given as JSON, newest first. A name that this process knows keeps its form."""
    for text in dict.fromkeys(map(str, definitions)):
        with contextlib.suppress(*_BROKEN):
            definition = json.loads(text)
            if definition["name"] not in workloads():
                known(definition)
