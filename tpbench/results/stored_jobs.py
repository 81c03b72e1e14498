"""Read rows of other versions of tpbench: keys and missing fields follow from the job that a row stores.

A field that the stored job lacks counts as its default. A new field therefore makes no row stale, but a changed default
does.
"""

from __future__ import annotations

import functools
import json
import typing
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tpbench.job import key_of
from tpbench.measure.settings import MeasureSettings
from tpbench.results.columns import TEXT
from tpbench.results.schema import all_columns
from tpbench.settings import defaults
from tpbench.workloads import workloads


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
    return {name: _column_defaults(workload.problem) for name, workload in workloads().items()}


def _column_defaults(problem: type) -> dict[str, Any]:
    types: dict[str, Any] = {}
    for cls in (MeasureSettings, problem):
        hints = typing.get_type_hints(cls)
        types |= {name: (hints[name], default) for name, default in defaults(cls).items()}
    columns = all_columns()
    return {
        name: str(default) if columns[name].type == TEXT else default
        for name, (hint, default) in types.items()
        if name in columns and type(None) not in typing.get_args(hint)
    }


def with_defaults(table: pa.Table) -> pa.Table:
    """Return the table with the defaults of fields that rows lack."""
    for workload, fields in column_defaults().items():
        of_workload = None
        for name, default in fields.items():
            if name not in table.column_names or not table.column(name).null_count:
                continue
            if of_workload is None:
                of_workload = pc.fill_null(pc.equal(table.column("workload"), workload), False)
            column = table.column(name)
            lacking = pc.and_(pc.is_null(column), of_workload)
            filled = pc.if_else(lacking, pa.scalar(default, column.type), column)
            table = table.set_column(table.column_names.index(name), name, filled)
    return table
