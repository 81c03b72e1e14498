"""Combine the tables of many files into one of the current schema."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import pyarrow as pa

from tpbench.results.columns import TEXT
from tpbench.results.files import FileRows, Unreadable, shown
from tpbench.results.printable import printable
from tpbench.results.schema import SCHEMA_VERSION, all_columns

_MISFITS = (Unreadable, pa.ArrowException, ValueError)
"""Errors of a table that does not fit the schema."""


def combine_tables(reads: Mapping[Path, FileRows]) -> tuple[pa.Table, list[str], list[Path]]:
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
                complaints.append(f"{shown(path)}: skipped, it is broken: {printable(str(error))}")
    return concatenate(tables), complaints, used


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


def concatenate(tables: list[pa.Table]) -> pa.Table:
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
