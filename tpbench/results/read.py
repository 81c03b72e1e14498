"""Rows from disk as one tidy pandas frame.

Nothing that a file says is evaluated: Arrow reads it, its metadata but for the schema version is dropped, and what
pandas sees are the declared columns.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from tpbench.results.columns import FLAG, INT, TEXT
from tpbench.results.find import Where, row_files
from tpbench.results.schema import MARKER, SCHEMA_VERSION, all_columns
from tpbench.results.upgrade import upgrade

_THREADS = min(4, os.cpu_count() or 1)
_LOOKS = 3
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

    table: pa.Table
    version: int


def load(where: Where = "outputs") -> pd.DataFrame:
    """All rows in `where`: a folder and the folders within, a file, a glob, or a list of these.

    The frame has every column of the schema and of every workload, whether or not a row fills it, in the schema's
    order; whole numbers, truth values and text are nullable, samples are arrays, moments are UTC. Rows are in the
    order in which they were made, and one that is found twice, because it was copied or merged into a bigger file,
    counts once. A file that is broken or not tpbench's is named in a RowWarning and passed over. Raises
    FileNotFoundError where there is no such place.
    """
    reads, complaints = _read_all(where)
    newer = [path for path, read in reads.items() if read.version > SCHEMA_VERSION]
    if newer:
        versions = ", ".join(sorted({str(reads[path].version) for path in newer}))
        complaints.append(
            f"{newer[0]}{f' and {len(newer) - 1} more' if len(newer) > 1 else ''}: written by a newer tpbench (schema "
            f"{versions}, this one knows {SCHEMA_VERSION}); columns that this one does not know are left out"
        )
    table, misfits = _unite(reads)
    for complaint in complaints + misfits:
        warnings.warn(complaint, RowWarning, stacklevel=2)
    return _frame(table)


def _read_all(where: Where) -> tuple[dict[Path, _Read], list[str]]:
    """Every readable file, and a complaint for each other one."""
    reads: dict[Path, _Read] = {}
    refused: dict[Path, str] = {}
    with ThreadPoolExecutor(_THREADS) as threads:
        for _ in range(_LOOKS):
            new = [path for path in row_files(where) if path not in reads and path not in refused]
            vanished = False
            for path, result in zip(new, threads.map(_read, new), strict=True):
                if isinstance(result, _Read):
                    reads[path] = result
                elif result is None:
                    vanished = True
                else:
                    refused[path] = f"{path}: passed over, {result}"
            if not vanished:  # else its rows may have moved into a file that the last look did not see
                break
    return reads, list(refused.values())


def _read(path: Path) -> _Read | _Unreadable | None:
    """The file's rows, or why not, or None where it is gone."""
    try:
        content = path.read_bytes()  # whole, not mapped: a file cut short under a mapping would end this process
    except FileNotFoundError:
        return None
    except OSError as error:
        return _Unreadable(f"it cannot be opened: {error.strerror or error}")
    try:
        parquet = pq.ParquetFile(pa.BufferReader(content), pre_buffer=False, page_checksum_verification=True)
        marker = (parquet.metadata.metadata or {}).get(MARKER)
        if marker is None:
            return _Unreadable("it is not tpbench's")
        table = parquet.read(use_threads=False).replace_schema_metadata(None)
        return _Read(table, int(marker))
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, NotImplementedError, MemoryError) as error:
        return _Unreadable(f"it is broken: {' '.join(str(error).split())[:200]}")


def _unite(reads: dict[Path, _Read]) -> tuple[pa.Table, list[str]]:
    """One table of the current schema, and a complaint for each file that does not fit it.

    Files alike are put together before anything is done a column: ten thousand rows come in a handful of kinds.
    """
    kinds: list[tuple[int, pa.Schema, list[Path]]] = []
    for path, read in reads.items():
        for version, schema, paths in kinds:
            if version == read.version and schema.equals(read.table.schema):
                paths.append(path)
                break
        else:
            kinds.append((read.version, read.table.schema, [path]))
    tables, complaints = [], []
    for version, _, paths in kinds:
        try:
            table = pa.concat_tables([reads[path].table for path in paths]).combine_chunks()
            tables.append(_conform(table, version))
        except (_Unreadable, pa.ArrowException, ValueError) as error:
            complaints += [f"{path}: passed over, it is broken: {error}" for path in paths]
    return _concatenate(tables), complaints


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
    """A type for a column whose files differ: numbers become floats, anything else text."""
    distinct = {kind for kind in types if not pa.types.is_null(kind)}
    if len(distinct) <= 1:
        return distinct.pop() if distinct else pa.null()
    if all(pa.types.is_integer(kind) or pa.types.is_floating(kind) for kind in distinct):
        return pa.float64()
    return TEXT


def _frame(table: pa.Table) -> pd.DataFrame:
    frame: pd.DataFrame = table.to_pandas(types_mapper=_PANDAS_TYPES.get)
    identified = frame["row_id"].notna()
    again = frame.duplicated(["row_id", "started_at", "finished_at"]) & identified
    frame = frame[~again]
    return frame.sort_values(["started_at", "cell", "row_id"], kind="stable", na_position="first", ignore_index=True)
