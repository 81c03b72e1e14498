"""Load the rows of folders, files or globs as one tidy pandas frame or Arrow table."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from tpbench.results.columns import FLAG, INT, TEXT
from tpbench.results.computed import LABEL, column_defaults, label_columns, with_defaults, with_keys, with_labels
from tpbench.results.current_rows import suspicious_rows
from tpbench.results.row_files import FileRows, Unreadable, Where, read_files, shown
from tpbench.results.schema import COLUMN_LIST, SCHEMA_VERSION, all_columns, common_columns, workload_columns
from tpbench.results.write import row_path, row_table
from tpbench.suggestions import printable, unknown

_ORDER = ("started_at", "cell", "row_id")
_PANDAS_TYPES = {
    TEXT: pd.StringDtype("pyarrow", na_value=np.nan),
    INT: pd.Int64Dtype(),
    FLAG: pd.BooleanDtype(),
}


class RowWarning(UserWarning):
    """A file was skipped, or read in part. The message names the file."""


def load(where: Where = "outputs", *, columns: Sequence[str] | None = None, **equal: Any) -> pd.DataFrame:
    """Return all rows in `where`: a folder with its subfolders, a file, a glob, or a list of these.

    `columns` selects columns; the others are not read. Every other keyword is a column with the value, or the list of
    values, that rows must have: `load("outputs", status="ok", tp_size=[2, 4], columns=["variant", "vocab",
    "time_ms"])`. outputs/SCHEMA.md lists the columns with their units.

    The frame has the columns in the schema's order, even those that no row fills. If all rows are of one workload, or
    `workload` names one, other workloads' columns are left out. After `variant` comes `label`, which no file has: the
    variant with its options, as reports name it. `pivot_table(columns="label")` does not merge rows of different
    options, which `columns="variant"` does.

    Whole numbers, truth values and text are nullable, samples are arrays, times are UTC. Rows are in the order in which
    they were made. A row that is found twice, because its file was copied or merged, counts once. A broken file, or one
    of another program, is skipped with a RowWarning that names it. Raises FileNotFoundError if there is no such place,
    ValueError for a column that does not exist.
    """
    return _frame(_load(where, columns, equal))


def load_table(where: Where = "outputs", *, columns: Sequence[str] | None = None, **equal: Any) -> pa.Table:
    """Return the same rows as `load`, as an Arrow table for DuckDB, polars and others."""
    return _load(where, columns, equal)


def _frame(table: pa.Table) -> pd.DataFrame:
    frame: pd.DataFrame = table.to_pandas(types_mapper=_PANDAS_TYPES.get)
    return frame


def _load(where: Where, columns: Sequence[str] | None, equal: Mapping[str, Any]) -> pa.Table:
    needed = None
    if columns is not None:
        needed = frozenset({*columns, *equal, *_ORDER, "finished_at"})
        needed |= label_columns() if LABEL in needed else frozenset()
        needed |= {"workload"} if any(needed & fields.keys() for fields in column_defaults().values()) else frozenset()
        needed |= {"job"} if "key" in needed else frozenset()
    reads, complaints = read_files(where, needed)
    newer = [path for path, read in reads.items() if read.version > SCHEMA_VERSION]
    if newer:
        versions = ", ".join(sorted({str(reads[path].version) for path in newer}))
        complaints.append(
            f"{shown(newer[0])}{f' and {len(newer) - 1} more' if len(newer) > 1 else ''}: written by a newer tpbench "
            f"(schema {versions}, this one knows {SCHEMA_VERSION}); columns that this one does not know are left out"
        )
    table, misfits, _ = combine(reads)
    table = with_defaults(table)
    if needed is None or "key" in needed:
        table = with_keys(table)
    for complaint in (*complaints, *misfits, *suspicious_rows(table)):
        warnings.warn(complaint, RowWarning, stacklevel=3)
    if columns is None or LABEL in (*columns, *equal):
        table = with_labels(table)
    for name in (*equal, *(columns or ())):
        if name not in table.column_names:
            raise ValueError(unknown("column", name, table.column_names, COLUMN_LIST))
    for name, value in equal.items():
        table = table.filter(_has(table.column(name), name, value))
    table = _in_order(table)
    return _without_other_workloads(table, equal) if columns is None else table.select(list(dict.fromkeys(columns)))


def _without_other_workloads(table: pa.Table, equal: Mapping[str, Any]) -> pa.Table:
    """Return the table without the columns of other workloads if its rows are of one workload."""
    wanted = equal.get("workload")
    workloads = [wanted] if isinstance(wanted, str) else table.column("workload").unique().to_pylist()
    if len(workloads) != 1:
        return table
    foreign = all_columns().keys() - common_columns().keys() - workload_columns().get(workloads[0], {}).keys()
    return table.select([name for name in table.column_names if name not in foreign])


def _has(column: pa.ChunkedArray, name: str, value: Any) -> pa.Array:
    """Return a mask of the rows that have the value, or one of the values in a list."""
    values = list(value) if isinstance(value, (list, tuple, set, frozenset)) else [value]
    kind = TEXT if pa.types.is_null(column.type) else column.type
    try:
        wanted = pa.array(values, kind)
    except (pa.ArrowException, TypeError, OverflowError):
        raise ValueError(f"{name}={value!r}: the column is {kind}") from None
    return pc.is_in(column.cast(kind), value_set=wanted)


def load_row(output_dir: str, row_id: str) -> dict[str, Any]:
    """Return one row of an output folder, with None for an empty column. The row may be merged with others."""
    own_file = row_path(output_dir, row_id)
    (row,) = plain_rows(load(own_file if own_file.exists() else Path(output_dir, "rows"), row_id=row_id))
    return row


def frame_of(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Return rows that this process wrote or loaded as a frame like that of `load`."""
    known = all_columns()
    filled = [{name: value for name, value in row.items() if name in known and value is not None} for row in rows]
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

    Files of a newer tpbench, and files that cannot be read, are left out, with one complaint for each.
    """
    reads, complaints = read_files(where, None)
    current = {path: read for path, read in reads.items() if read.version <= SCHEMA_VERSION}
    complaints += [f"{shown(path)}: left as it is, written by a newer tpbench" for path in reads if path not in current]
    table, misfits, used = combine(current)
    return _in_order(table), used, complaints + misfits


def combine(reads: Mapping[Path, FileRows]) -> tuple[pa.Table, list[str], list[Path]]:
    """Return one table of the current schema, a complaint for each file that does not fit it, and the files that do.

    Files of equal schema are concatenated before any work per column: ten thousand files have a handful of schemas.
    """
    groups: dict[tuple[int, bytes], dict[Path, pa.Table]] = defaultdict(dict)
    for path, read in reads.items():
        groups[read.version, read.table.schema.serialize().to_pybytes()][path] = read.table
    tables: list[pa.Table] = []
    complaints: list[str] = []
    used: list[Path] = []
    for (version, _), tables_by_path in groups.items():
        try:
            tables.append(_conform(pa.concat_tables(list(tables_by_path.values())).combine_chunks(), version))
            used += tables_by_path
            continue
        except (Unreadable, pa.ArrowException, ValueError):
            pass  # at least one of these files does not fit
        for path, table in tables_by_path.items():
            try:
                tables.append(_conform(table, version))
                used.append(path)
            except (Unreadable, pa.ArrowException, ValueError) as error:
                complaints.append(f"{shown(path)}: skipped, it is broken: {printable(str(error))}")
    return _concatenate(tables), complaints, used


def _conform(table: pa.Table, version: int) -> pa.Table:
    """Return the table with its columns in the declared types.

    An undeclared column stays, unless a newer tpbench wrote the file.
    """
    columns = all_columns()
    if len(set(table.column_names)) < len(table.column_names):
        raise Unreadable("it has two columns of one name")
    arrays = {}
    for name, array in zip(table.column_names, table.columns, strict=True):
        declared = columns.get(name)
        if declared is None and version > SCHEMA_VERSION:
            continue
        if declared is not None and not pa.types.is_null(declared.type) and array.type != declared.type:
            try:
                array = array.cast(declared.type)
            except pa.ArrowException:
                if version > SCHEMA_VERSION:
                    continue
                raise Unreadable(f"column {name} is {array.type}, not {declared.type}") from None
        arrays[name] = array
    return pa.table(arrays)


def _concatenate(tables: Sequence[pa.Table]) -> pa.Table:
    """Return all tables as one with every declared column, in order, and then the other columns."""
    declared = pa.schema([(name, column.type) for name, column in all_columns().items()]).empty_table()
    try:
        return pa.concat_tables([declared, *tables], promote_options="permissive").combine_chunks()
    except pa.ArrowException:  # the types of a column without a declared type differ
        types: dict[str, set[pa.DataType]] = defaultdict(set)
        for field in (field for table in tables for field in table.schema if not pa.types.is_null(field.type)):
            types[field.name].add(field.type)
        tables = [_with_texts(table, {name for name, kinds in types.items() if len(kinds) > 1}) for table in tables]
        return pa.concat_tables([declared, *tables], promote_options="permissive").combine_chunks()


def _with_texts(table: pa.Table, names: set[str]) -> pa.Table:
    """Return the table with those of its columns as text."""
    for name in names.intersection(table.column_names):
        values = table.column(name).to_pylist()
        texts = pa.array([None if value is None else str(value) for value in values], TEXT)
        table = table.set_column(table.column_names.index(name), name, texts)
    return table


def _in_order(table: pa.Table) -> pa.Table:
    """Return each row once, in the order in which the rows were made."""
    frame = _frame(table.select([*_ORDER, "finished_at"]))
    again = frame.duplicated(["row_id", "started_at", "finished_at"]) & frame["row_id"].notna()
    order = frame[~again].sort_values(list(_ORDER), kind="stable", na_position="first").index
    return table.take(pa.array(order, pa.int64()))
