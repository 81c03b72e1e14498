"""Load the rows of folders, files or globs as one tidy pandas frame or Arrow table."""

import contextlib
import json
import typing
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from tpbench.job import key_of
from tpbench.measure.machine import known_gpu
from tpbench.measure.session import MeasureSettings
from tpbench.results.current_rows import rows_with_missed_work
from tpbench.results.row_files import Where, read_files
from tpbench.results.schema import (
    COLUMN_LIST,
    COMMON_COLUMNS,
    FLAG,
    INT,
    REAL,
    REALS,
    STATUSES,
    TEXT,
    all_columns,
    arrow_type,
    type_of,
    workload_columns,
)
from tpbench.results.write import row_path, row_table
from tpbench.settings import defaults, spelled
from tpbench.suggestions import printable, unknown
from tpbench.workloads import Workload, cached_until_registered, variants, workloads
from tpbench.workloads.definition import register_stored, workload_of
from tpbench.workloads.study_data import oldest_first

_ORDER = ("started_at", "cell", "row_id")
DEFINITION, SHARE = "workload_definition", "datasheet_share"
LABEL = "label"
"""Name of a column that no file has: the variant with the options that it was run with, as reports name it."""
_PANDAS_TYPES = {
    TEXT: pd.StringDtype("pyarrow", na_value=np.nan),
    INT: pd.Int64Dtype(),
    FLAG: pd.BooleanDtype(),
}


class RowWarning(UserWarning):
    """A file was skipped, or read in part. The message names the file."""


def load(where: Where = "outputs", *, columns: str | Sequence[str] | None = None, **equal: Any) -> pd.DataFrame:
    """Return all rows in `where`: a folder with its subfolders, a file, a glob, or a list of these.

    `columns` selects one column or several. Every other keyword is a column with the value, or
    the list of values, that rows must have: `load("outputs", status="ok", tp_size=[2, 4], columns=["variant", "vocab",
    "time_ms"])`. `python -m tpbench docs columns` lists the columns with their units.

    The frame has the columns in the schema's order, even those that no row fills. If all rows are of one workload, or
    `workload` names one, other workloads' columns are left out. After `variant` comes `label`, which no file has: the
    variant with its options, as reports name it. `pivot_table(columns="label")` does not merge rows of different
    options, which `columns="variant"` does.

    Whole numbers, truth values and text are nullable, samples are arrays, times are UTC. Rows are in the order in which
    they were made. A row that is found twice, because its file was copied or merged, counts once. A broken file, or one
    of another program, is skipped with a RowWarning that names it. Raises FileNotFoundError if there is no such place,
    ValueError for a column, status, workload or variant that does not exist.
    """
    return _frame(_load(where, columns, equal))


def load_table(where: Where = "outputs", *, columns: str | Sequence[str] | None = None, **equal: Any) -> pa.Table:
    """Return the same rows as `load`, as an Arrow table for DuckDB, polars and others."""
    return _load(where, columns, equal)


def _frame(table: pa.Table) -> pd.DataFrame:
    frame: pd.DataFrame = table.to_pandas(types_mapper=_PANDAS_TYPES.get)
    return frame


def _load(where: Where, columns: str | Sequence[str] | None, equal: Mapping[str, Any]) -> pa.Table:
    columns = [columns] if isinstance(columns, str) else columns
    table, _, complaints = read_table(where)
    table = with_labels(with_datasheet(with_keys(with_defaults(table))))
    for complaint in (*complaints, *rows_with_missed_work(table)):
        warnings.warn(complaint, RowWarning, stacklevel=3)
    for name in (*equal, *(columns or ())):
        if name not in table.column_names:
            raise ValueError(unknown("column", name, table.column_names, COLUMN_LIST))
    for name, value in equal.items():
        values = list(value) if isinstance(value, (list, tuple, set, frozenset)) else [value]
        table = table.filter(_has(table.column(name), name, values))
    return _without_other_workloads(table, equal) if columns is None else table.select(list(dict.fromkeys(columns)))


def _without_other_workloads(table: pa.Table, equal: Mapping[str, Any]) -> pa.Table:
    """Return the table without the columns of other workloads if its rows are of one workload."""
    wanted = equal.get("workload")
    workloads = [wanted] if isinstance(wanted, str) else table.column("workload").unique().to_pylist()
    if len(workloads) != 1:
        return table
    foreign = all_columns().keys() - COMMON_COLUMNS.keys() - workload_columns().get(workloads[0], {}).keys()
    return table.select([name for name in table.column_names if name not in foreign])


def _has(column: pa.ChunkedArray, name: str, values: list[Any]) -> pa.Array:
    """Return a mask of the rows that have one of the values.

    Raises ValueError for values of another type, and for a status, workload or variant that exists neither in tpbench
    nor in the rows.
    """
    named: Mapping[str, Iterable[str]] = {"status": STATUSES, "workload": workloads(), "variant": variants()}
    if name in named:
        names = {*named[name], *column.unique().drop_null().to_pylist()}
        for value in values:
            if value is not None and value not in names:
                raise ValueError(unknown(name, value, names))
    kind = TEXT if pa.types.is_null(column.type) else column.type
    try:
        if kind == INT and any(isinstance(value, float) and not value.is_integer() for value in values):
            raise TypeError  # Arrow would cut 2.5 to 2
        return pc.is_in(column.cast(kind), value_set=pa.array(values, kind))
    except (pa.ArrowException, TypeError, OverflowError):
        raise ValueError(f"{name}={values[0] if len(values) == 1 else values!r}: the column is {kind}") from None


def load_row(output_dir: str, row_id: str) -> dict[str, Any]:
    """Return one row of an output folder, with None for an empty column. The row may be merged with others."""
    own_file = row_path(output_dir, row_id)
    (row,) = plain_rows(load(own_file if own_file.exists() else Path(output_dir, "rows"), row_id=row_id))
    return row


def frame_of(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Return rows that this process wrote or loaded as a frame like that of `load`."""
    filled = [{name: row[name] for name in all_columns() if row.get(name) is not None} for row in rows]
    return _frame(with_labels(_in_order(_concatenate([row_table(row) for row in filled]))))


def plain_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return each row of a frame as a dictionary by column name. Every missing value is None."""
    columns = {}
    for name in frame.columns:
        values, missing = frame[name].tolist(), frame[name].isna().tolist()
        columns[name] = [None if gone else value for value, gone in zip(values, missing, strict=True)]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def read_table(where: Where) -> tuple[pa.Table, list[Path], list[str]]:
    """Return the rows of all files as one table without duplicates, the files that were read, and complaints.

    The workloads of users' files that rows define are known from then on, in their newest form.
    """
    contents = read_files(where)
    complaints = {path: why for path, why in contents.items() if isinstance(why, str)}
    tables = {path: rows for path, rows in contents.items() if not isinstance(rows, str)}
    groups: dict[pa.Schema, list[Path]] = defaultdict(list)  # ten thousand files have a handful of schemas
    for path, table in tables.items():
        groups[table.schema].append(path)
    waiting = list(groups.values())
    names = [DEFINITION, "started_at"]
    defining = (tables[path] for schema, paths in groups.items() if {*names} <= {*schema.names} for path in paths)
    definitions = oldest_first(row for table in defining for row in table.select(names).to_pylist())
    register_stored(row[DEFINITION] for row in reversed(definitions))
    fitting: list[pa.Table] = []
    used: list[Path] = []
    for paths in waiting:
        try:
            fitting.append(_conform(pa.concat_tables([tables[path] for path in paths]).combine_chunks()))
            used += paths
        except (pa.ArrowException, ValueError) as error:
            if len(paths) > 1:  # at least one of these files does not fit
                waiting += [[path] for path in paths]
            else:
                complaints[paths[0]] = f"it is broken: {printable(str(error))}"
    texts = [f"{printable(str(path), 1000)}: skipped, {why}" for path, why in complaints.items()]
    return _in_order(_concatenate(fitting)), used, texts


def _conform(table: pa.Table) -> pa.Table:
    """Return the table with its columns in the declared types: other programs write types of other widths."""
    columns = all_columns()
    if len(set(table.column_names)) < len(table.column_names):
        raise ValueError("it has two columns of one name")
    arrays = {}
    for name, array in zip(table.column_names, table.columns, strict=True):
        wanted = arrow_type(columns[name]) if name in columns else pa.null()
        if pa.types.is_null(wanted):  # a result, whose type is known from a value
            wanted = next(map(type_of, array.drop_null().slice(0, 1).to_pylist()), None)
            wanted = wanted or (REALS if pa.types.is_list(array.type) else array.type)
        if str(array.type) != str(wanted):  # equal types of lists may differ in the names of their items
            try:
                array = pa.nulls(len(array), wanted) if array.null_count == len(array) else array.cast(wanted)
            except pa.ArrowException:
                raise ValueError(f"column {name} is {array.type}, not {wanted}") from None
        arrays[name] = array
    return pa.table(arrays)


def _concatenate(tables: Sequence[pa.Table]) -> pa.Table:
    """Return all tables as one with every declared column, in order, and then the other columns.

    A result that is a number in some files and a text in others becomes a text.
    """
    declared = pa.schema([(name, arrow_type(column)) for name, column in all_columns().items()]).empty_table()
    types: dict[str, set[pa.DataType]] = defaultdict(set)
    for field in (field for table in tables for field in table.schema if not pa.types.is_null(field.type)):
        types[field.name].add(REAL if field.type == INT else field.type)
    mixed = {name for name, kinds in types.items() if len(kinds) > 1}
    parts = [declared]
    for table in tables:
        for name in mixed.intersection(table.column_names):
            values = table.column(name).to_pylist()
            texts = pa.array([None if value is None else str(value) for value in values], TEXT)
            table = table.set_column(table.column_names.index(name), name, texts)
        parts.append(table)
    return pa.concat_tables(parts, promote_options="permissive").combine_chunks()


def _in_order(table: pa.Table) -> pa.Table:
    """Return each row once, in the order in which the rows were made."""
    frame = _frame(table.select([*_ORDER, "finished_at"]))
    again = frame.duplicated(["row_id", "started_at", "finished_at"]) & frame["row_id"].notna()
    order = frame[~again].sort_values(list(_ORDER), kind="stable", na_position="first").index
    return table.take(pa.array(order, pa.int64()))


def with_keys(table: pa.Table) -> pa.Table:
    """Return the table with the key of each stored job. A row whose job this version cannot read keeps its key."""
    jobs, keys = table.column("job").to_pylist(), table.column("key").to_pylist()
    computed: dict[str | None, str] = {}
    for job in {*jobs} - {None}:
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):  # it may be any text
            computed[job] = key_of(json.loads(job))
    column = pa.array([computed.get(job, key) for job, key in zip(jobs, keys, strict=True)], TEXT)
    return table.set_column(table.column_names.index("key"), "key", column)


@cached_until_registered
def column_defaults() -> dict[str, dict[str, Any]]:
    """Return the default of each column that holds a field, by workload. Fields that may be null are left out."""
    defaults_by_workload: dict[str, dict[str, Any]] = {}
    for name, workload in workloads().items():
        columns = COMMON_COLUMNS | workload_columns()[name]
        types = typing.get_type_hints(MeasureSettings) | typing.get_type_hints(workload.problem)
        fields = defaults(MeasureSettings) | defaults(workload.problem)
        defaults_by_workload[name] = {
            field: default
            for field, default in fields.items()
            if field in columns and type(None) not in typing.get_args(types[field])
        }
    return defaults_by_workload


def with_defaults(table: pa.Table) -> pa.Table:
    """Return the table with the defaults of fields that rows lack.

    A row of a user's operation whose problem has another form since gets none: nobody ran that default.
    """
    known, places = workloads(), table.select(["workload", DEFINITION]).to_pylist()
    of_other_form = [
        row[DEFINITION] is not None and workload_of(row) is not known.get(row["workload"]) for row in places
    ]
    for workload, fields in column_defaults().items():
        lacking = [name for name in fields if name in table.column_names and table.column(name).null_count]
        of_workload = pc.fill_null(pc.equal(table.column("workload"), workload), False) if lacking else None
        if of_workload is not None and any(of_other_form):
            of_workload = pc.and_not(of_workload, pa.array(of_other_form))
        for name in lacking if of_workload is not None and pc.any(of_workload).as_py() else ():
            column, value = table.column(name), fields[name]
            if pa.types.is_null(column.type):  # of a user's workload, no row of which has the field
                column = column.cast(pa.scalar(value).type)
            default = pa.scalar(str(value) if column.type == TEXT else value, column.type)
            filled = pc.if_else(pc.and_(pc.is_null(column), of_workload), default, column)
            table = table.set_column(table.column_names.index(name), name, filled)
    return table


def with_datasheet(table: pa.Table) -> pa.Table:
    """Return the table with `datasheet_share`, which no file has, of the rows on known GPUs."""
    pairs = zip(table.column("gpu_name").to_pylist(), table.column("gb_per_s").to_pylist(), strict=True)
    known = [(known_gpu(name or ""), rate) for name, rate in pairs]
    shares = [rate / gpu[1] if rate and gpu else None for gpu, rate in known]
    return table.set_column(table.column_names.index(SHARE), SHARE, pa.array(shares, REAL))


def default_options(workload: Workload | None) -> dict[str, Any]:
    """Return the options that a label names if their value differs from this default."""
    of_workload = workload.option_defaults if workload else {"block_cap": "auto"}
    return {**of_workload, "graph": False, "fresh": False}


def chosen_options(row: Mapping[str, Any], workload: Workload | None) -> tuple[tuple[str, Any], ...]:
    """Return the names and values of a row's options that are not the defaults, in declared order.

    A value that the row's CUDA graph requires counts as a default.
    """
    required = workload.graph_options if workload and row.get("graph") else {}
    values = ((name, row.get(name), default) for name, default in default_options(workload).items())
    return tuple((name, value) for name, value, default in values if value not in (None, default, required.get(name)))


def with_labels(table: pa.Table) -> pa.Table:
    """Return the table with the column `label` after `variant`. Rows of equal options have equal labels."""
    used = {"workload", "variant", *(name for one in (None, *workloads().values()) for name in default_options(one))}
    names = [name for name in table.column_names if name in used]
    rows = list(zip(*(table.column(name).to_pylist() for name in names), strict=True))
    labels: dict[tuple[Any, ...], str | None] = {}
    for values in dict.fromkeys(rows):
        row = dict(zip(names, values, strict=True))
        options = chosen_options(row, workloads().get(row["workload"]))
        words = [row["variant"], *(f"{name}={spelled(value)}" for name, value in options)]
        labels[values] = None if row["variant"] is None else " ".join(words)
    texts = pa.array([labels[values] for values in rows], TEXT)
    return table.add_column(table.column_names.index("variant") + 1, pa.field(LABEL, TEXT), texts)
