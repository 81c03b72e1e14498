"""The schema of rows: columns, types, version and the statuses of a cell."""

from __future__ import annotations

import datetime
import functools
import re
import types
import typing
from typing import Any

import pyarrow as pa

from tpbench.results.columns import COLUMNS, FLAG, INT, REAL, REALS, TEXT, TIME, Column
from tpbench.workloads import Workload, workloads

SCHEMA_VERSION = 2
"""Increased if a column is renamed, retyped or removed. Not if one is added. Files of older versions are not read."""

MARKER = b"tpbench.schema_version"
"""Key in a Parquet file's metadata: it marks the file as tpbench's and holds the version of its schema."""

COLUMN_LIST = "outputs/SCHEMA.md"
"""The generated page that describes every column."""

STATUSES = {
    "ok": "correct and measured",
    "oom": "a rank ran out of memory",
    "wrong": "differs from the oracle, and so has no time",
    "timeout": "took longer than a job may",
    "error": "a rank or its launch failed",
    "skipped": "cannot run on this machine",
}

_UNIT = re.compile(r"(?P<meaning>.*), (?P<unit>ms|s|J|KiB|MiB|GiB|GB/s|TFLOP/s)")
"""End of a meaning that names a unit."""
_NAMED_UNITS = {"_gb_per_s": "GB/s", "_ms": "ms", "_kib": "KiB", "_mib": "MiB", "_gib": "GiB"}
"""Units by the end of a column's name."""
_TYPES = {bool: FLAG, int: INT, float: REAL, str: TEXT}


class RowError(ValueError):
    """A row does not fit the schema. The message names the column."""


@functools.cache
def common_columns() -> dict[str, Column]:
    """Return the columns of every row, by name, in order."""
    return {column.name: column for column in COLUMNS}


@functools.cache
def workload_columns() -> dict[str, dict[str, Column]]:
    """Return the columns that each workload adds.

    A field of the problem has the type of its annotation, and its help as meaning. The other columns are results. Their
    type is known from a value only (`type_of`), and is Arrow's null until then. A unit ends the meaning, as in
    "..., ms", or the name.
    """
    return {name: _columns_of(workload) for name, workload in workloads().items()}


def _columns_of(workload: Workload) -> dict[str, Column]:
    hints = typing.get_type_hints(workload.problem)
    common = common_columns()
    columns = {}
    for name, doc in workload.row_columns.items():
        if name not in common:
            match = _UNIT.fullmatch(doc)
            named = next((unit for end, unit in _NAMED_UNITS.items() if name.endswith(end)), "")
            meaning, unit = (match["meaning"], match["unit"]) if match else (doc, named)
            columns[name] = Column(name, type_from_hint(hints[name]) if name in hints else pa.null(), meaning, unit)
    return columns


@functools.cache
def all_columns() -> dict[str, Column]:
    """Return every column of a frame of rows: the common ones, then those of each workload."""
    columns = dict(common_columns())
    for added in workload_columns().values():
        for name, column in added.items():
            columns.setdefault(name, column)
    return columns


def type_from_hint(hint: Any) -> pa.DataType:
    """Return the Arrow type for a field's type hint. A choice between words and numbers is text."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        kinds = {kind for kind in typing.get_args(hint) if kind is not type(None)}
    elif typing.get_origin(hint) is typing.Literal:
        kinds = {type(choice) for choice in typing.get_args(hint)}
    else:
        kinds = {hint}
    return _TYPES.get(kinds.pop(), TEXT) if len(kinds) == 1 else TEXT


def type_of(value: Any) -> pa.DataType | None:
    """Return the Arrow type for a value, or None if columns have no such type."""
    if isinstance(value, (list, tuple)):
        numbers = all(isinstance(item, (int, float)) and not isinstance(item, bool) for item in value)
        return REALS if numbers else None
    if isinstance(value, datetime.datetime):
        return TIME if value.tzinfo else None
    return next((kind for cls, kind in _TYPES.items() if isinstance(value, cls)), None)
