"""Put one row on disk: whole, durable and once, or not at all."""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import os
import re
import secrets
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import tpbench
from tpbench.results.columns import FLAG, INT, REAL, REALS, TEXT, TIME
from tpbench.results.compacted import moved
from tpbench.results.front import seal, text_of
from tpbench.results.schema import MARKER, SCHEMA_VERSION, STATUSES, RowError, common_columns, type_of, workload_columns
from tpbench.settings import unknown

_ROW_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=,+-]{0,199}")
_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF}


class RowExists(FileExistsError):
    """Somebody has written this row before: theirs stays."""


def row_path(output_dir: str | os.PathLike[str], row_id: str) -> Path:
    """Where a row lies."""
    if not _ROW_ID.fullmatch(row_id):
        raise RowError(f"row_id {row_id!r} is no plain file name")
    return Path(output_dir, "rows", f"{row_id}.parquet")


def row_exists(output_dir: str | os.PathLike[str], row_id: str) -> bool:
    """Whether that row is on disk, in a file of its own or merged with others."""
    path = row_path(output_dir, row_id)
    return path.is_file() or moved(path.parent, row_id)


def write_row(row: Mapping[str, Any], output_dir: str | os.PathLike[str], row_id: str) -> Path:
    """Write `row` to OUTPUT_DIR/rows/ROW_ID.parquet and return that path.

    Columns that are not in `row` are null; row_id, schema_version and tpbench_version need not be. When this returns,
    the row survives a power cut. Raises RowError for a column that does not exist or a value that its type cannot
    hold, RowExists when the row is there already, and OSError when the disk does not take it: nothing half-written
    is left then.
    """
    path = row_path(output_dir, row_id)
    own = {"row_id": row_id, "schema_version": SCHEMA_VERSION}
    for name, value in own.items():
        if row.get(name) not in (None, value):
            raise RowError(f"{name}={row[name]!r} must be {value!r} here")
    content = parquet_bytes(row_table({"tpbench_version": tpbench.__version__} | dict(row) | own))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{row_id}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        _write_durably(temporary, content)
        _publish(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    sync_folder(path.parent)
    return path


def row_table(row: Mapping[str, Any]) -> pa.Table:
    """The row as an Arrow table of one line, in the schema's types and order."""
    common = common_columns()
    added = workload_columns().get(row.get("workload") or "", {})
    known = common | added
    for name in row:
        if name not in known:
            raise RowError(unknown("column", name, known))
    if row.get("status") is not None and row["status"] not in STATUSES:
        raise RowError(unknown("status", row["status"], STATUSES))
    arrays = {}
    for name, column in known.items():
        value = _plain(row.get(name))
        kind = column.type
        if pa.types.is_null(kind):
            if value is None:
                continue  # its type is not known: the absence says as much as a null
            kind = type_of(value)
        arrays[name] = _array(name, kind, value)
    return pa.table(arrays)


def _plain(value: Any) -> Any:
    """Numpy's scalars and arrays as Python's: what measures hands over either."""
    return value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value


_ACCEPTED: dict[pa.DataType | None, tuple[type, ...]] = {
    TEXT: (str,),
    INT: (int,),
    REAL: (int, float),
    FLAG: (bool,),
    TIME: (datetime.datetime,),
    REALS: (list, tuple),
}


_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_EXACT = 2**53
"""Whole numbers beyond are not all double-precision numbers."""
_FORMATS = {INT: "<q", REAL: "<d", FLAG: "<?", TIME: "<q"}


def _array(name: str, kind: pa.DataType | None, value: Any) -> pa.Array:
    """One value as a column. Arrow alone would make 1 of true and a moment in UTC of a local one."""
    if value is None:
        return pa.nulls(1, kind)
    accepted = isinstance(value, _ACCEPTED.get(kind, ()))
    if not accepted or (isinstance(value, bool) and kind != FLAG):
        raise RowError(f"{name}={_short(value)} is a {type(value).__name__}: the column is {kind or 'of no such type'}")
    if kind == TIME and value.tzinfo is None:
        raise RowError(f"{name}={value} has no time zone")
    if kind == REALS and any(isinstance(item, bool) for item in value):
        raise RowError(f"{name}={_short(value)} has a truth value among its numbers")
    if kind in (REAL, REALS) and any(isinstance(each, int) and abs(each) > _EXACT for each in _numbers(value)):
        raise RowError(f"{name}={_short(value)} does not fit {kind} exactly")
    if kind == TEXT:
        # The output of a process may hold bytes that are no text, and must not cost the row.
        value = value.encode("utf-8", "backslashreplace").decode("utf-8")
    try:
        return _one(value, kind)
    except (struct.error, OverflowError) as error:
        raise RowError(f"{name}={_short(value)} does not fit {kind}: {error}") from None


def _numbers(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else (value,)


def _one(value: Any, kind: pa.DataType) -> pa.Array:
    """An array of one value, from its bytes: given Python's values, Arrow imports pandas to see whether they are its,
    for which a rank has neither the time nor, after it ran out of memory, the memory."""
    if kind == REALS:
        numbers = pa.Array.from_buffers(REAL, len(value), [None, pa.py_buffer(struct.pack(f"<{len(value)}d", *value))])
        return pa.Array.from_buffers(
            kind, 1, [None, pa.py_buffer(struct.pack("<2i", 0, len(value)))], children=[numbers]
        )
    if kind == TEXT:
        text = value.encode()
        return pa.Array.from_buffers(
            kind, 1, [None, pa.py_buffer(struct.pack("<2i", 0, len(text))), pa.py_buffer(text)]
        )
    if kind == TIME:
        value = (value - _EPOCH) // datetime.timedelta(microseconds=1)
    return pa.Array.from_buffers(kind, 1, [None, pa.py_buffer(struct.pack(_FORMATS[kind], value))])


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def parquet_bytes(table: pa.Table) -> bytes:
    """The file's bytes. Made in memory, so that a fault in here leaves no trace on disk."""
    sink = pa.BufferOutputStream()
    # For one line, dictionaries, statistics and a copy of the schema are most of the file and of the time to read it.
    with pq.ParquetWriter(
        sink,
        table.schema,
        compression="none",
        use_dictionary=False,
        write_statistics=False,
        store_schema=False,
        write_page_checksum=True,
    ) as writer:
        sink.write(text_of(table))
        writer.write_table(table)
        writer.add_key_value_metadata({MARKER.decode(): str(SCHEMA_VERSION)})
    content = bytearray(sink.getvalue())
    seal(content)
    return bytes(content)


def _write_durably(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _publish(temporary: Path, path: Path) -> None:
    """Give the finished file its name, unless another has it: a hard link is the one step that does both."""
    if moved(path.parent, path.stem):
        raise RowExists(errno.EEXIST, "this row has been written before, and merged", str(path))
    try:
        os.link(temporary, path)
    except FileExistsError:
        # A network file system may have made the link, lost the answer and tried again.
        if not (path.exists() and temporary.samefile(path)):
            raise RowExists(errno.EEXIST, "this row has been written before", str(path)) from None
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        _publish_by_rename(temporary, path)


def _publish_by_rename(temporary: Path, path: Path) -> None:
    """For file systems without hard links: look, then rename, under a lock that dies with its holder."""
    with path.with_name(".lock").open("a") as lock:
        with contextlib.suppress(OSError):  # no locks either: what is left is a window of microseconds
            fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            raise RowExists(errno.EEXIST, "this row has been written before", str(path))
        temporary.rename(path)


def sync_folder(folder: Path) -> None:
    """Make the new name durable, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)
