"""A row as text in front of its columns, in the same Parquet file: to open a file of one row and decode a hundred
columns takes ten times as long as to read one line of JSON.

It lies between Parquet's first four bytes and the first column, where no other reader looks: they follow the
offsets in the footer. One checksum is over the text and all that follows, so the text cannot outlive a change of the
columns: then, and in files without it, the columns are read.
"""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any

import pyarrow as pa

from tpbench.results.columns import FLAG, INT, REAL, REALS, TEXT, TIME
from tpbench.results.schema import SCHEMA_VERSION, all_columns, type_of

_PARQUET = b"PAR1"
_HEAD = struct.Struct("<4s16sII")
"""Parquet's magic, ours, the length of the text, the checksum of all that comes after these."""
_MAGIC = b"tpbench row text"
_PLAIN = {TEXT: str, INT: int, REAL: float, FLAG: bool, TIME: int, REALS: list}


def text_of(table: pa.Table) -> bytes:
    """What goes into the file after Parquet's magic, for a table of one line. `seal` makes it valid."""
    scalars = {name: column[0] for name, column in zip(table.column_names, table.columns, strict=True)}
    # A moment's number as it is stored: as Python's, Arrow would import pandas for it.
    values = {name: each.value if each.type == TIME else each.as_py() for name, each in scalars.items()}
    filled = {name: value for name, value in values.items() if value is not None}
    text = json.dumps({"version": SCHEMA_VERSION, "row": filled}).encode()
    return _HEAD.pack(_PARQUET, _MAGIC, len(text), 0)[len(_PARQUET) :] + text


def seal(content: bytearray) -> None:
    """Put the checksum of the finished file in its place."""
    magic, ours, length, _ = _HEAD.unpack_from(content)
    _HEAD.pack_into(content, 0, magic, ours, length, zlib.crc32(memoryview(content)[_HEAD.size :]))


def row_of(content: bytes) -> dict[str, Any] | None:
    """The filled columns of the file's row, moments in microseconds; None where the columns have to be read: there is
    no text, it is not what was written, or it is of another version of the schema."""
    if len(content) < _HEAD.size:
        return None
    magic, ours, length, checksum = _HEAD.unpack_from(content)
    if (magic, ours) != (_PARQUET, _MAGIC) or zlib.crc32(memoryview(content)[_HEAD.size :]) != checksum:
        return None
    try:
        text = json.loads(content[_HEAD.size : _HEAD.size + length])
        row: dict[str, Any] = text["row"]
        return row if text["version"] == SCHEMA_VERSION and _fits(row) else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _fits(row: dict[str, Any]) -> bool:
    """Whether each value is of its column's type."""
    declared = all_columns()
    for name, value in row.items():
        kind = declared[name].type if name in declared else pa.null()
        kind = type_of(value) if pa.types.is_null(kind) else kind
        if kind is None or type(value) is not _PLAIN[kind]:
            return False
        if type(value) is int and not -(2**63) <= value < 2**63:
            return False
        if type(value) is list and not all(type(item) is float for item in value):
            return False
    return True


def kind_of(row: dict[str, Any]) -> tuple[tuple[str, pa.DataType], ...]:
    """The columns whose type is not declared, with those they have here. Rows alike go into one table."""
    declared = all_columns()
    return tuple(
        (name, type_of(value))
        for name, value in row.items()
        if name not in declared or pa.types.is_null(declared[name].type)
    )


def table_of(rows: list[dict[str, Any]], columns: frozenset[str] | None) -> pa.Table:
    """Rows of one kind as a table of those columns that any of them fills."""
    declared = all_columns()
    kinds = dict(kind_of(rows[0]))
    filled = (name for row in rows for name in row if columns is None or name in columns)
    names = dict.fromkeys(["row_id", *filled])
    return pa.table(
        {
            name: pa.array([row.get(name) for row in rows], kinds[name] if name in kinds else declared[name].type)
            for name in names
        }
    )
