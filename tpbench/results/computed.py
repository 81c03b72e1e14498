"""Columns that are computed when rows are read: keys, values of fields that rows lack, and labels.

The key of a row follows from the job that the row stores, and a field that the job lacks counts as its default. A new
field therefore makes no row stale, but a changed default does.
"""

from __future__ import annotations

import functools
import json
import typing
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tpbench.job import key_of
from tpbench.measure.session import MeasureSettings
from tpbench.results.columns import TEXT
from tpbench.results.schema import all_columns
from tpbench.settings import defaults, spelled
from tpbench.workloads import Workload, workloads

LABEL = "label"
"""Name of a column that no file has: the variant with the options that it was run with, as reports name it."""


def with_keys(table: pa.Table) -> pa.Table:
    """Return the table with the key of each stored job. A row whose job this version cannot read keeps its key."""
    keys: dict[tuple[str | None, str | None], str | None] = {}
    rows = list(zip(table.column("job").to_pylist(), table.column("key").to_pylist(), strict=True))
    for job, key in dict.fromkeys(rows):
        keys[job, key] = key if job is None else _key_of(job) or key
    column = pa.array([keys[row] for row in rows], TEXT)
    return table.set_column(table.column_names.index("key"), "key", column)


def _key_of(job: str) -> str | None:
    try:
        return key_of(json.loads(job))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # a job may be any text
        return None


@functools.cache
def column_defaults() -> dict[str, dict[str, Any]]:
    """Return the default of each column that holds a field, by workload. Fields that may be null are left out."""
    columns = all_columns()
    defaults_by_workload: dict[str, dict[str, Any]] = {}
    for name, workload in workloads().items():
        types = typing.get_type_hints(MeasureSettings) | typing.get_type_hints(workload.problem)
        fields = defaults(MeasureSettings) | defaults(workload.problem)
        defaults_by_workload[name] = {
            field: str(default) if columns[field].type == TEXT else default
            for field, default in fields.items()
            if field in columns and type(None) not in typing.get_args(types[field])
        }
    return defaults_by_workload


def with_defaults(table: pa.Table) -> pa.Table:
    """Return the table with the defaults of fields that rows lack."""
    for workload, fields in column_defaults().items():
        lacking = [name for name in fields if name in table.column_names and table.column(name).null_count]
        if lacking:
            of_workload = pc.fill_null(pc.equal(table.column("workload"), workload), False)
        for name in lacking:
            column = table.column(name)
            default = pa.scalar(fields[name], column.type)
            filled = pc.if_else(pc.and_(pc.is_null(column), of_workload), default, column)
            table = table.set_column(table.column_names.index(name), name, filled)
    return table


def default_options(workload: Workload | None) -> dict[str, Any]:
    """Return the options that a label names if their value differs from this default."""
    return {**(workload.option_defaults if workload else {"block_cap": "auto"}), "graph": False, "fresh": False}


def chosen_options(row: Mapping[str, Any], workload: Workload | None) -> tuple[tuple[str, Any], ...]:
    """Return the names and values of a row's options that are not the defaults, in declared order."""
    return tuple(
        (name, row[name])
        for name, default in default_options(workload).items()
        if row.get(name) is not None and row[name] != default
    )


def label_columns() -> frozenset[str]:
    """Return the columns from which labels are computed."""
    options = {name for workload in workloads().values() for name in default_options(workload)}
    return frozenset({"workload", "variant", *options, *default_options(None)})


def with_labels(table: pa.Table) -> pa.Table:
    """Return the table with the column `label` after `variant`. Rows of equal options have equal labels."""
    names = [name for name in table.column_names if name in label_columns()]
    rows = list(zip(*(table.column(name).to_pylist() for name in names), strict=True))
    labels: dict[tuple[Any, ...], str | None] = {}
    for values in dict.fromkeys(rows):
        row = dict(zip(names, values, strict=True))
        options = chosen_options(row, workloads().get(row["workload"]))
        words = [row["variant"], *(f"{name}={spelled(value)}" for name, value in options)]
        labels[values] = None if row["variant"] is None else " ".join(words)
    texts = pa.array([labels[values] for values in rows], TEXT)
    return table.add_column(table.column_names.index("variant") + 1, pa.field(LABEL, TEXT), texts)
