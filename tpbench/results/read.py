"""Reads rows from disk into one tidy pandas frame.

Nothing in a file is evaluated: Arrow reads it, and its metadata is dropped except for the version of the schema.
"""

from __future__ import annotations

import itertools
import os
import stat
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tpbench.results.checksum import is_damaged
from tpbench.results.columns import FLAG, INT, TEXT
from tpbench.results.find import Where, row_files
from tpbench.results.label import LABEL, label_columns, with_labels
from tpbench.results.plain import plain_rows
from tpbench.results.printable import printable
from tpbench.results.schema import COLUMN_LIST, MARKER, SCHEMA_VERSION, all_columns, common_columns, workload_columns
from tpbench.results.suspicious import suspicious_rows
from tpbench.results.upgrade import (
    added_fields,
    present_name,
    present_value,
    upgrade,
    with_added_fields,
    with_former_names,
)
from tpbench.results.write import row_path, row_table
from tpbench.settings import unknown

_THREADS = min(4, os.cpu_count() or 1)
_LOOKS = 3
_MAX_BYTES = 2**32
"""Largest file that is read, in bytes, and largest content of a compressed file by its metadata."""
_MAX_ROWS = 10**7
"""Most rows of one file."""
_ORDER = ("started_at", "cell", "row_id")
_PANDAS_TYPES = {
    TEXT: pd.StringDtype("pyarrow", na_value=np.nan),
    INT: pd.Int64Dtype(),
    FLAG: pd.BooleanDtype(),
}


class RowWarning(UserWarning):
    """A file was skipped, or read in part. The message names the file."""


class _Unreadable(Exception):
    """The reason why a file is skipped."""


_MISFITS = (_Unreadable, pa.ArrowException, ValueError)
"""Errors of a table that does not fit the schema."""


@dataclass(frozen=True)
class _Read:
    """The content of one file."""

    version: int
    """Version of the schema that wrote the file."""
    table: pa.Table


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
    frame: pd.DataFrame = _load(where, columns, equal).to_pandas(types_mapper=_PANDAS_TYPES.get)
    return frame


def load_table(where: Where = "outputs", *, columns: Sequence[str] | None = None, **equal: Any) -> pa.Table:
    """Return the same rows as `load`, as an Arrow table for DuckDB, polars and others."""
    return _load(where, columns, equal)


def _load(where: Where, columns: Sequence[str] | None, equal: Mapping[str, Any]) -> pa.Table:
    needed = None
    if columns is not None:
        needed = frozenset({*map(present_name, (*columns, *equal)), *_ORDER, "finished_at"})
        needed |= label_columns() if LABEL in needed else frozenset()
        needed |= {"workload"} if any(needed & fields.keys() for fields in added_fields().values()) else frozenset()
    reads, complaints = _read_all(where, needed)
    newer = [path for path, read in reads.items() if read.version > SCHEMA_VERSION]
    if newer:
        versions = ", ".join(sorted({str(reads[path].version) for path in newer}))
        complaints.append(
            f"{_shown(newer[0])}{f' and {len(newer) - 1} more' if len(newer) > 1 else ''}: written by a newer tpbench "
            f"(schema {versions}, this one knows {SCHEMA_VERSION}); columns that this one does not know are left out"
        )
    table, misfits, _ = _unite(reads)
    table = with_added_fields(table)
    misfits += suspicious_rows(table)
    for complaint in complaints + misfits:
        warnings.warn(complaint, RowWarning, stacklevel=3)
    if columns is None or LABEL in (*columns, *equal):
        table = with_labels(table)
    table = with_former_names(table, columns or ())
    for name in (*map(present_name, equal), *(columns or ())):
        if name not in table.column_names:
            raise ValueError(unknown("column", name, table.column_names, COLUMN_LIST))
    for name, value in equal.items():
        table = table.filter(_has(table.column(present_name(name)), name, value))
    table = _in_order(table)
    return _without_other_workloads(table, equal) if columns is None else table.select(list(dict.fromkeys(columns)))


def _without_other_workloads(table: pa.Table, equal: Mapping[str, Any]) -> pa.Table:
    """Return the table without the columns of other workloads if its rows are of one workload."""
    asked = equal.get("workload")
    found = [asked] if isinstance(asked, str) else table.column("workload").unique().to_pylist()
    if len(found) != 1:
        return table
    own = {*common_columns(), *workload_columns().get(found[0], {})}
    foreign = all_columns().keys() - own
    return table.select([name for name in table.column_names if name not in foreign])


def _has(column: pa.ChunkedArray, name: str, value: Any) -> pa.Array:
    """Return a mask of the rows that have the value, or one of the values in a list."""
    values = list(value) if isinstance(value, (list, tuple, set, frozenset)) else [value]
    values = [present_value(name, each) for each in values]
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
    table = with_labels(_in_order(_concatenate([row_table(row) for row in filled])))
    frame: pd.DataFrame = table.to_pandas(types_mapper=_PANDAS_TYPES.get)
    return frame


def read_table(where: Where) -> tuple[pa.Table, list[Path], list[str]]:
    """Return the rows of all files as one table without duplicates, the files that were read, and complaints.

    Files of a newer tpbench, and files that cannot be read, are left out, with one complaint for each.
    """
    reads, complaints = _read_all(where, None)
    current = {path: read for path, read in reads.items() if read.version <= SCHEMA_VERSION}
    complaints += [
        f"{_shown(path)}: left as it is, written by a newer tpbench" for path in reads if path not in current
    ]
    table, misfits, used = _unite(current)
    return _in_order(table), used, complaints + misfits


def _read_all(where: Where, columns: frozenset[str] | None) -> tuple[dict[Path, _Read], list[str]]:
    """Return the content of every readable file, and a complaint for each other file."""
    reads: dict[Path, _Read] = {}
    refused: dict[Path, str] = {}
    with ThreadPoolExecutor(_THREADS) as threads:
        for _ in range(_LOOKS):
            new = [path for path in row_files(where) if path not in reads and path not in refused]
            vanished = False
            # Threads only for the disk: while Arrow parses such small files, it holds the interpreter lock.
            for path, content in zip(new, threads.map(_content, new), strict=True):
                result = _parse(content, columns) if isinstance(content, bytes) else content
                if isinstance(result, _Read):
                    reads[path] = result
                elif result is None:
                    vanished = True
                else:
                    refused[path] = f"{_shown(path)}: passed over, {result}"
            if not vanished:  # else its rows may have moved to a merged file that the last listing did not contain
                break
    return reads, list(refused.values())


def _content(path: Path) -> bytes | _Unreadable | None:
    """Return the file's bytes, or why it cannot be read, or None if it was deleted."""
    try:
        # Without waiting: the opening of a pipe would wait for a writer.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                return _Unreadable("it is no regular file")
            if status.st_size > _MAX_BYTES:
                return _Unreadable(f"it is larger than {_MAX_BYTES} bytes")
            return file.read(_MAX_BYTES)  # not mapped: truncating a mapped file would kill this process
    except FileNotFoundError:
        return None
    except (OSError, MemoryError) as error:
        return _Unreadable(f"it cannot be opened: {getattr(error, 'strerror', None) or error}")


def _parse(content: bytes, columns: frozenset[str] | None) -> _Read | _Unreadable:
    """Return the file's rows with those columns, or why they cannot be read."""
    if is_damaged(content):
        return _Unreadable("it is broken: its checksum does not fit its content")
    try:
        parquet = pq.ParquetFile(pa.BufferReader(content), pre_buffer=False, page_checksum_verification=True)
        marker = (parquet.metadata.metadata or {}).get(MARKER)
        if marker is None:
            return _Unreadable("it is not tpbench's")
        version = int(marker)
        if version < 0:
            return _Unreadable(f"it is broken: there is no version {version} of the schema")
        groups = (parquet.metadata.row_group(index) for index in range(parquet.metadata.num_row_groups))
        if parquet.metadata.num_rows > _MAX_ROWS or sum(group.total_byte_size for group in groups) > _MAX_BYTES:
            return _Unreadable(f"it has more than {_MAX_ROWS} rows or {_MAX_BYTES} bytes")
        wanted = None
        if columns is not None and version == SCHEMA_VERSION:  # an older schema may have other names
            wanted = [name for name in parquet.schema_arrow.names if name in columns]
        table = parquet.read(columns=wanted, use_threads=False).replace_schema_metadata(None)
        table.validate(full=True)  # text that is not UTF-8 would fail much later
        return _Read(version, table)
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, NotImplementedError, MemoryError) as error:
        return _Unreadable(f"it is broken: {printable(str(error))}")


def _shown(path: Path) -> str:
    """Return a path as text that a terminal shows: the name of a file may hold anything."""
    return printable(str(path), 1000)


def _unite(reads: dict[Path, _Read]) -> tuple[pa.Table, list[str], list[Path]]:
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
        except _MISFITS:
            pass  # at least one of these files does not fit
        for path, table in tables_by_path.items():
            try:
                tables.append(_conform(table, version))
                used.append(path)
            except _MISFITS as error:
                complaints.append(f"{_shown(path)}: passed over, it is broken: {printable(str(error))}")
    return _concatenate(tables), complaints, used


def _conform(table: pa.Table, version: int) -> pa.Table:
    """Return the table with its columns in the declared types.

    An undeclared column stays, unless a newer tpbench wrote the file.
    """
    columns = all_columns()
    if len(set(table.column_names)) < len(table.column_names):
        raise _Unreadable("it has two columns of one name")
    table = upgrade(table, version)
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
                raise _Unreadable(f"column {name} is {array.type}, not {declared.type}") from None
        arrays[name] = array
    return pa.table(arrays)


def _concatenate(tables: list[pa.Table]) -> pa.Table:
    """Return all tables as one with every declared column, in order, and then the other columns.

    The time grows with the number of columns in all tables. A search for each name in each table would take longer.
    """
    declared = all_columns()
    starts = list(itertools.accumulate((len(table) for table in tables), initial=0))
    found: dict[str, list[tuple[int, pa.ChunkedArray]]] = {name: [] for name in declared}
    for start, table in zip(starts, tables, strict=False):
        for name, column in zip(table.column_names, table.columns, strict=True):
            found.setdefault(name, []).append((start, column))
    arrays = {}
    for name, columns in found.items():
        kind = declared[name].type if name in declared else pa.null()
        if pa.types.is_null(kind):
            kind = _common_type(column.type for _, column in columns)
        chunks: list[pa.Array] = []
        end = 0
        for start, column in columns:
            chunks += [pa.nulls(start - end, kind), *column.cast(kind).chunks]
            end = start + len(column)
        chunks.append(pa.nulls(starts[-1] - end, kind))
        arrays[name] = pa.chunked_array(chunks, kind).combine_chunks()
    return pa.table(arrays)


def _common_type(types: Iterable[pa.DataType]) -> pa.DataType:
    """Return the type of a column whose files differ: floats for numbers, lists of them for lists, else text."""
    distinct = {kind for kind in types if not pa.types.is_null(kind)}
    if len(distinct) <= 1:
        return distinct.pop() if distinct else pa.null()
    if all(map(pa.types.is_list, distinct)):  # files may name the elements differently
        return pa.list_(_common_type(kind.value_type for kind in distinct))
    if all(pa.types.is_integer(kind) or pa.types.is_floating(kind) for kind in distinct):
        return pa.float64()
    return TEXT


def _in_order(table: pa.Table) -> pa.Table:
    """Return each row once, in the order in which the rows were made."""
    frame = table.select([*_ORDER, "finished_at"]).to_pandas(types_mapper=_PANDAS_TYPES.get)
    identified = frame["row_id"].notna()
    again = frame.duplicated(["row_id", "started_at", "finished_at"]) & identified
    order = frame[~again].sort_values(list(_ORDER), kind="stable", na_position="first").index
    return table.take(pa.array(order, pa.int64()))
