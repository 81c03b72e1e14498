"""Writes one row to disk: whole, durable and once, or not at all."""

import contextlib
import errno
import fcntl
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import tpbench
from tpbench.files import sync_folder, write_durably
from tpbench.results.row_files import with_checksum
from tpbench.results.schema import (
    COLUMN_LIST,
    COMMON_COLUMNS,
    INT,
    MARKER,
    REAL,
    SCHEMA_VERSION,
    STATUSES,
    TEXT,
    RowError,
    arrow_type,
    type_of,
    workload_columns,
)
from tpbench.suggestions import printable, unknown
from tpbench.workloads.definition import register_stored

_ROW_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=,+-]{0,199}")


class RowExists(FileExistsError):
    """The row exists already, and stays as it is."""


def row_path(output_dir: str | os.PathLike[str], row_id: str) -> Path:
    """Return the path of a row's own file. Raises RowError if the name of the row isn't a plain file name."""
    if not _ROW_ID.fullmatch(row_id):
        raise RowError(f"row_id {row_id!r} is no plain file name")
    return Path(output_dir, "rows", f"{row_id}.parquet")


def write_row(row: Mapping[str, Any], output_dir: str | os.PathLike[str], row_id: str) -> Path:
    """Write `row` to OUTPUT_DIR/rows/ROW_ID.parquet and return that path.

    row_id, schema_version and tpbench_version are added. When this returns, the row survives a power cut. Raises
    RowError for a column that does not exist or a value that its type cannot hold, RowExists if the row is there
    already, and OSError if the disk does not take it. After an error nothing is left.
    """
    path = row_path(output_dir, row_id)
    identity = {"row_id": row_id, "schema_version": SCHEMA_VERSION}
    content = parquet_bytes(row_table({"tpbench_version": tpbench.__version__} | dict(row) | identity))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{row_id}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        write_durably(temporary, content)
        _publish(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    sync_folder(path.parent)
    return path


def row_table(row: Mapping[str, Any]) -> pa.Table:
    """Return the row as an Arrow table of one line, without columns that have no value. Raises RowError."""
    register_stored([row.get("workload_definition")])
    columns = COMMON_COLUMNS | workload_columns().get(row.get("workload") or "", {})
    for name in row:
        if name not in columns:
            raise RowError(unknown("column", name, columns, COLUMN_LIST))
    if row.get("status") is not None and row["status"] not in STATUSES:
        raise RowError(unknown("status", row["status"], STATUSES))
    arrays = {}
    for name, column in columns.items():
        value = row.get(name)
        value = value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value
        if value is not None:
            kind = type_of(value) if column.type is object else arrow_type(column)
            arrays[name] = _array(name, kind, value)
    return pa.table(arrays)


def _array(name: str, kind: pa.DataType | None, value: Any) -> pa.Array:
    """Return one value as a column. Raises RowError for values that Arrow would convert, as true to 1."""
    value_type = type_of(value)
    if value_type is None or (value_type != kind and (value_type, kind) != (INT, REAL)):
        column = kind or "of no such type"
        raise RowError(f"{name}={printable(repr(value), 80)} is a {type(value).__name__}: the column is {column}")
    if kind == TEXT:
        # The output of a process may hold bytes that are not UTF-8; they must not cost the row.
        value = value.encode("utf-8", "backslashreplace").decode("utf-8")
    try:
        return pa.array([value], kind)
    except (pa.ArrowException, OverflowError) as error:
        raise RowError(f"{name}={printable(repr(value), 80)} does not fit {kind}: {error}") from None


def parquet_bytes(table: pa.Table, *, compressed: bool = False) -> bytes:
    """Return the bytes of a file of rows. `compressed`: for many rows."""
    # For one row, dictionaries, statistics and a copy of the schema would be most of the file and of the reading time.
    one_row = {"use_dictionary": False, "write_statistics": False, "store_schema": False}
    options = {"compression": "zstd"} if compressed else {"compression": "none", **one_row}
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, table.schema, **options) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({MARKER.decode(): str(SCHEMA_VERSION)})
    return with_checksum(bytes(sink.getvalue()))


def _publish(temporary: Path, path: Path) -> None:
    """Give the finished file its name, unless the name is taken. A hard link checks and names in one step."""
    try:
        os.link(temporary, path)
    except OSError:  # the name is taken, or the file system has no hard links
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # without locks, two writers may both find the name free
                fcntl.flock(folder, fcntl.LOCK_EX)
            # A network file system may have made the link, lost the answer and tried again: then the link is ours.
            if path.exists() and not temporary.samefile(path):
                raise RowExists(errno.EEXIST, "this row has been written before", str(path)) from None
            temporary.replace(path)
        finally:
            os.close(folder)
