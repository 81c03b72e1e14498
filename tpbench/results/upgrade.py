"""Read rows of an older schema as rows of the current one, and columns by their former names."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tpbench.results.schema import SCHEMA_VERSION
from tpbench.settings import added_defaults
from tpbench.workloads import workloads

Values = Mapping[str, str]


@dataclass(frozen=True)
class Upgrade:
    """The changes from one version of the schema to the next. A new column needs no mention: it reads as null.

    Renamed names and values are also replaced in the JSON of the column `job`.
    """

    renamed: Mapping[str, str] = field(default_factory=dict)
    """Old column name to new name."""
    values: Mapping[str, Values] = field(default_factory=dict)
    """New column name to its renamed values, old to new."""
    removed: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """New column name to the value that rows of the old version have there."""


_ALGORITHMS = {"fused": "two_reads", "cached": "two_kernels", "one_pass": "one_read"}
UPGRADES: dict[int, Upgrade] = {
    1: Upgrade(
        renamed={"organisation": "algorithm", "organisation_used": "algorithm_used"},
        values={"algorithm": _ALGORITHMS, "algorithm_used": _ALGORITHMS},
    ),
}
"""By the version that each upgrade starts from. A version without an entry has no change that needs one."""


def upgrade(table: pa.Table, version: int) -> pa.Table:
    """Return rows of schema `version` as rows of the current one."""
    for step in sorted(step for step in UPGRADES if version <= step < SCHEMA_VERSION):
        change = UPGRADES[step]
        table = table.select([name for name in table.column_names if name not in change.removed])
        table = table.rename_columns([change.renamed.get(name, name) for name in table.column_names])
        for name, values in change.values.items():
            table = _map(table, name, values)
        if change.renamed and "job" in table.column_names:
            jobs = table.column("job").unique().to_pylist()
            table = _map(table, "job", {job: _renamed_job(job, change) for job in jobs if job})
        for name, value in change.defaults.items():
            if name not in table.column_names:
                table = table.append_column(name, pa.array([value] * len(table)))
    return table


@functools.cache
def added_fields() -> dict[str, dict[str, Any]]:
    """Return the fields that were added to each workload's problem, with their defaults."""
    return {name: added_defaults(workload.problem) for name, workload in workloads().items()}


def with_added_fields(table: pa.Table) -> pa.Table:
    """Fill the fields that a row lacks because it is older than they are: it did what their defaults do."""
    for workload, fields in added_fields().items():
        for name, default in fields.items():
            column = table.column(name) if name in table.column_names else None
            if column is None or not column.null_count:
                continue
            older = pc.and_(pc.is_null(column), pc.equal(table.column("workload"), workload))
            filled = pc.if_else(pc.fill_null(older, False), pa.scalar(default, column.type), column)
            table = table.set_column(table.column_names.index(name), name, filled)
    return table


def present_name(name: str) -> str:
    """Return the present name of a column that may be called by a former one."""
    for step in sorted(UPGRADES):
        name = UPGRADES[step].renamed.get(name, name)
    return name


def present_value(name: str, value: Any) -> Any:
    """Return a column's value, which may be a former one, under its present name. `name`: present or former."""
    for step in sorted(UPGRADES):
        name = UPGRADES[step].renamed.get(name, name)
        value = UPGRADES[step].values.get(name, {}).get(value, value) if isinstance(value, str) else value
    return value


def with_former_names(table: pa.Table, names: Iterable[str]) -> pa.Table:
    """Add the columns that `names` calls by a former name. They hold the former values."""
    for former in names:
        if former in table.column_names or (name := present_name(former)) not in table.column_names:
            continue
        table = table.append_column(former, table.column(name))
        for step in sorted(UPGRADES, reverse=True):
            table = _map(table, former, {new: old for old, new in UPGRADES[step].values.get(name, {}).items()})
    return table


def _renamed_job(job: str, change: Upgrade) -> str:
    try:
        fields = json.loads(job)
        renamed = {change.renamed.get(name, name): value for name, value in fields.items()}
    except (ValueError, AttributeError, RecursionError):
        return job
    return json.dumps({
        name: change.values[name].get(value, value) if name in change.values and isinstance(value, str) else value
        for name, value in renamed.items()
    })  # fmt: skip


def _map(table: pa.Table, name: str, values: Values) -> pa.Table:
    """Replace values of a text column."""
    if not values or name not in table.column_names or table.schema.field(name).type != pa.string():
        return table
    column = pa.array([values.get(value, value) for value in table.column(name).to_pylist()], pa.string())
    return table.set_column(table.column_names.index(name), name, column)
