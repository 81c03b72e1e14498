"""Rows from disk as one tidy pandas frame.

Nothing that a file says is evaluated: Arrow reads it, its metadata but for the schema version is dropped, and what
pandas sees are the declared columns.
"""

from __future__ import annotations

import os
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

from tpbench.results.columns import FLAG, INT, TEXT
from tpbench.results.find import Where, row_files
from tpbench.results.front import kind_of, row_of, table_of
from tpbench.results.schema import MARKER, SCHEMA_VERSION, all_columns
from tpbench.results.upgrade import present_name, present_value, upgrade, with_former_names
from tpbench.settings import unknown

_THREADS = min(4, os.cpu_count() or 1)
_LOOKS = 3
_ORDER = ("started_at", "cell", "row_id")
_PANDAS_TYPES = {
    TEXT: pd.StringDtype("pyarrow", na_value=np.nan),
    INT: pd.Int64Dtype(),
    FLAG: pd.BooleanDtype(),
}


class RowWarning(UserWarning):
    """A file was passed over, or read in part. The message names it."""


class _Unreadable(Exception):
    """Why a file is passed over."""


@dataclass(frozen=True)
class _Read:
    """What one file held."""

    version: int
    content: pa.Table | dict[str, Any]
    """Its columns, or its row where that is there as text."""


def load(where: Where = "outputs", *, columns: Sequence[str] | None = None, **equal: Any) -> pd.DataFrame:
    """All rows in `where`: a folder and the folders within, a file, a glob, or a list of these.

    `columns` leaves all others on disk. Every other keyword is a column and the value, or list of values, that rows
    must have there: `load("outputs", status="ok", tp_size=[2, 4], columns=["variant", "vocab", "time_ms"])`.
    outputs/SCHEMA.md lists the columns with their units.

    The frame has every column of the schema and of every workload, whether or not a row fills it, in the schema's
    order; whole numbers, truth values and text are nullable, samples are arrays, moments are UTC. Rows are in the
    order in which they were made, and one that is found twice, because it was copied or merged into a bigger file,
    counts once. A file that is broken or not tpbench's is named in a RowWarning and passed over. Raises
    FileNotFoundError where there is no such place, ValueError for a column that does not exist.
    """
    frame: pd.DataFrame = _load(where, columns, equal).to_pandas(types_mapper=_PANDAS_TYPES.get)
    return frame


def load_table(where: Where = "outputs", *, columns: Sequence[str] | None = None, **equal: Any) -> pa.Table:
    """The same rows as an Arrow table, for DuckDB, polars and others. See `load`."""
    return _load(where, columns, equal)


def _load(where: Where, columns: Sequence[str] | None, equal: Mapping[str, Any]) -> pa.Table:
    needed = None if columns is None else frozenset({*map(present_name, (*columns, *equal)), *_ORDER, "finished_at"})
    reads, complaints = _read_all(where, needed)
    newer = [path for path, read in reads.items() if read.version > SCHEMA_VERSION]
    if newer:
        versions = ", ".join(sorted({str(reads[path].version) for path in newer}))
        complaints.append(
            f"{newer[0]}{f' and {len(newer) - 1} more' if len(newer) > 1 else ''}: written by a newer tpbench (schema "
            f"{versions}, this one knows {SCHEMA_VERSION}); columns that this one does not know are left out"
        )
    table, misfits, _ = _unite(reads, needed)
    for complaint in complaints + misfits:
        warnings.warn(complaint, RowWarning, stacklevel=3)
    table = with_former_names(table, columns or ())
    for name in (*map(present_name, equal), *(columns or ())):
        if name not in table.column_names:
            raise ValueError(unknown("column", name, table.column_names))
    for name, value in equal.items():
        table = table.filter(_has(table.column(present_name(name)), name, value))
    table = _in_order(table)
    return table if columns is None else table.select(list(dict.fromkeys(columns)))


def _has(column: pa.ChunkedArray, name: str, value: Any) -> pa.Array:
    """Which rows have that value, or one of those in a list."""
    values = list(value) if isinstance(value, (list, tuple, set, frozenset)) else [value]
    values = [present_value(name, each) for each in values]
    kind = TEXT if pa.types.is_null(column.type) else column.type
    try:
        wanted = pa.array(values, kind)
    except (pa.ArrowException, TypeError, OverflowError):
        raise ValueError(f"{name}={value!r}: the column is {kind}") from None
    return pc.is_in(column.cast(kind), value_set=wanted)


def read_table(where: Where) -> tuple[pa.Table, list[Path], list[str]]:
    """The rows of all files but those of a newer tpbench as one table without duplicates, the files that they came
    from, and a complaint for each other one."""
    reads, complaints = _read_all(where, None)
    current = {path: read for path, read in reads.items() if read.version <= SCHEMA_VERSION}
    complaints += [f"{path}: left as it is, written by a newer tpbench" for path in reads if path not in current]
    table, misfits, used = _unite(current)
    return _in_order(table), used, complaints + misfits


def _read_all(where: Where, columns: frozenset[str] | None) -> tuple[dict[Path, _Read], list[str]]:
    """Every readable file, and a complaint for each other one."""
    reads: dict[Path, _Read] = {}
    refused: dict[Path, str] = {}
    with ThreadPoolExecutor(_THREADS) as threads:
        for _ in range(_LOOKS):
            new = [path for path in row_files(where) if path not in reads and path not in refused]
            vanished = False
            # Only waiting for the disk is worth threads: Arrow does not let go of the interpreter for such small files.
            for path, content in zip(new, threads.map(_content, new), strict=True):
                result = _parse(content, columns) if isinstance(content, bytes) else content
                if isinstance(result, _Read):
                    reads[path] = result
                elif result is None:
                    vanished = True
                else:
                    refused[path] = f"{path}: passed over, {result}"
            if not vanished:  # else its rows may have moved into a file that the last look did not see
                break
    return reads, list(refused.values())


def _content(path: Path) -> bytes | _Unreadable | None:
    """The file, or why not, or None where it is gone."""
    try:
        return path.read_bytes()  # whole, not mapped: a file cut short under a mapping would end this process
    except FileNotFoundError:
        return None
    except OSError as error:
        return _Unreadable(f"it cannot be opened: {error.strerror or error}")


def _parse(content: bytes, columns: frozenset[str] | None) -> _Read | _Unreadable:
    """The file's rows, of those columns, or why not."""
    if (row := row_of(content)) is not None:
        return _Read(SCHEMA_VERSION, row)
    try:
        parquet = pq.ParquetFile(pa.BufferReader(content), pre_buffer=False, page_checksum_verification=True)
        marker = (parquet.metadata.metadata or {}).get(MARKER)
        if marker is None:
            return _Unreadable("it is not tpbench's")
        version = int(marker)
        wanted = None
        if columns is not None and version == SCHEMA_VERSION:  # an older file may call them something else
            wanted = [name for name in parquet.schema_arrow.names if name in columns]
        table = parquet.read(columns=wanted, use_threads=False).replace_schema_metadata(None)
        return _Read(version, table)
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, NotImplementedError, MemoryError) as error:
        return _Unreadable(f"it is broken: {' '.join(str(error).split())[:200]}")


def _unite(reads: dict[Path, _Read], columns: frozenset[str] | None = None) -> tuple[pa.Table, list[str], list[Path]]:
    """One table of the current schema, a complaint for each file that does not fit it, and the files that do.

    Files alike are put together before anything is done a column: ten thousand rows come in a handful of kinds.
    """
    texts: dict[object, dict[Path, dict[str, Any]]] = defaultdict(dict)
    kinds: list[tuple[int, pa.Schema, dict[Path, pa.Table]]] = []
    for path, read in reads.items():
        if isinstance(read.content, dict):
            texts[kind_of(read.content)][path] = read.content
            continue
        for version, schema, alike in kinds:
            if version == read.version and schema.equals(read.content.schema):
                alike[path] = read.content
                break
        else:
            kinds.append((read.version, read.content.schema, {path: read.content}))
    tables = [table_of(list(rows.values()), columns) for rows in texts.values()]
    complaints, used = [], [path for rows in texts.values() for path in rows]
    for version, _, alike in kinds:
        try:
            table = pa.concat_tables(list(alike.values())).combine_chunks()
            tables.append(_conform(table, version))
            used += alike
        except (_Unreadable, pa.ArrowException, ValueError) as error:
            complaints += [f"{path}: passed over, it is broken: {error}" for path in alike]
    return _concatenate(tables), complaints, used


def _conform(table: pa.Table, version: int) -> pa.Table:
    """The table's columns in the declared types. What is not declared stays, unless a newer tpbench declared it."""
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
    """All tables as one that has every declared column, in order, then the others."""
    declared = all_columns()
    others = dict.fromkeys(name for table in tables for name in table.column_names if name not in declared)
    arrays = {}
    for name in [*declared, *others]:
        kind = declared[name].type if name in declared else pa.null()
        if pa.types.is_null(kind):
            kind = _common_type(table.schema.field(name).type for table in tables if name in table.column_names)
        chunks: list[pa.Array] = []
        for table in tables:
            if name in table.column_names:
                chunks += table.column(name).cast(kind).chunks
            else:
                chunks.append(pa.nulls(len(table), kind))
        arrays[name] = pa.chunked_array(chunks, kind).combine_chunks()
    return pa.table(arrays)


def _common_type(types: Iterable[pa.DataType]) -> pa.DataType:
    """A type for a column whose files differ: numbers become floats, lists lists of such, anything else text."""
    distinct = {kind for kind in types if not pa.types.is_null(kind)}
    if len(distinct) <= 1:
        return distinct.pop() if distinct else pa.null()
    if all(map(pa.types.is_list, distinct)):  # which may differ in what a file calls their elements
        return pa.list_(_common_type(kind.value_type for kind in distinct))
    if all(pa.types.is_integer(kind) or pa.types.is_floating(kind) for kind in distinct):
        return pa.float64()
    return TEXT


def _in_order(table: pa.Table) -> pa.Table:
    """Each row once, in the order in which they were made."""
    frame = table.select([*_ORDER, "finished_at"]).to_pandas(types_mapper=_PANDAS_TYPES.get)
    identified = frame["row_id"].notna()
    again = frame.duplicated(["row_id", "started_at", "finished_at"]) & identified
    order = frame[~again].sort_values(list(_ORDER), kind="stable", na_position="first").index
    return table.take(pa.array(order, pa.int64()))
