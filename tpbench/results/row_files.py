"""Files of rows: where they are, their checksums, and the content of each as one Arrow table.

A file that cannot be read costs a complaint, not the other files. Nothing in a file is evaluated: Arrow reads it, and
its metadata is dropped.
"""

import glob
import hashlib
import os
import stat
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from tpbench.results.schema import MARKER, SCHEMA_VERSION
from tpbench.settings import user_path
from tpbench.suggestions import printable

Where: TypeAlias = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""A folder, a file, a glob, or several of these."""

_THREADS = min(4, os.cpu_count() or 1)
_LISTINGS = 3
"""Most times that the folder is listed: again if a file vanished, because its rows may be in a merged file now."""
_BEGIN, _END = b"\xfftpbench-sha256\xfe", b"\xfesha256-tpbench\xff"
"""Marks around the checksum. No valid text contains them. There are two, because a bit may change in one of them."""
_ADDED = ("label", "__index_level_0__")
"""Columns that a file has if pandas wrote it from a frame of `load`. They are not read."""
_FOOTER_END = 8
"""The last bytes of a Parquet file: the length of the footer and `PAR1`."""


def row_files(where: Where) -> list[Path]:
    """Return every Parquet file that `where` names, sorted, without duplicates.

    Folders are searched recursively. Hidden names are temporary files and are skipped. Raises FileNotFoundError for a
    name that matches nothing, JobError for an empty one.
    """
    places: list[Any] = [where]  # `user_path` refuses what is no path
    if isinstance(where, Iterable) and not isinstance(where, (str, bytes, Mapping)):
        places = list(where)
    return sorted({path.absolute() for place in places for path in _expand(user_path(place, "a place of rows"))})


def _expand(place: Path) -> Iterable[Path]:
    # A name that exists isn't a pattern, even with an asterisk in it. Path.glob accepts no absolute pattern.
    matches = [place] if place.exists() else [Path(match) for match in glob.glob(str(place), recursive=True)]  # noqa: PTH207
    if not matches:
        raise FileNotFoundError(f"no such folder or file: {place}")
    yield from (match for match in matches if not match.is_dir())
    for parent, folders, files in (step for match in matches if match.is_dir() for step in os.walk(match)):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(parent, name) for name in files if name.endswith(".parquet") and not name.startswith("."))


def with_checksum(content: bytes) -> bytes:
    """Return a Parquet file with a checksum of all its bytes. A file that has one already stays as it is.

    The checksum lies between the data and the footer, where no reader looks. A program that rewrites the file drops it,
    and the file is then read without a check.
    """
    if _BEGIN in content:
        return content
    footer = int.from_bytes(content[-_FOOTER_END:-4], "little")
    cut = len(content) - _FOOTER_END - footer
    before, after = content[:cut] + _BEGIN, _END + content[cut:]
    return before + hashlib.sha256(before + after).digest() + after


def has_right_checksum(content: bytes) -> bool | None:
    """Return whether the file's checksum, or the part of one that it has, fits its bytes. None if it has none."""
    begin, end = content.rfind(_BEGIN), content.rfind(_END)
    if begin < 0 and end < 0:
        return None
    start = end - hashlib.sha256().digest_size
    return 0 <= begin < start and hashlib.sha256(content[:start] + content[end:]).digest() == content[start:end]


def read_files(where: Where) -> dict[Path, pa.Table | str]:
    """Return the rows of each file, or why it cannot be read."""
    contents: dict[Path, pa.Table | str] = {}
    with ThreadPoolExecutor(_THREADS) as threads:
        for _ in range(_LISTINGS):
            new = [path for path in row_files(where) if path not in contents]
            read = dict(zip(new, threads.map(_read, new), strict=True))
            contents |= {path: rows for path, rows in read.items() if rows is not None}
            if None not in read.values():
                break
    return contents


def _read(path: Path) -> pa.Table | str | None:
    """Return the file's rows, or why it cannot be read, or None if it was deleted."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # to open a pipe would wait for a writer
            return "it is no regular file"
        content = path.read_bytes()  # not mapped: truncating a mapped file would kill this process
    except FileNotFoundError:
        return None
    except (OSError, MemoryError) as error:
        return f"it cannot be opened: {getattr(error, 'strerror', None) or error}"
    is_right = has_right_checksum(content)
    if is_right is False:
        return "it is broken: its checksum does not fit its content"
    try:
        table = _parquet(content)
        if not is_right and not isinstance(table, str):
            table.validate(full=True)  # text that is not UTF-8 would fail much later
        return table
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, NotImplementedError, MemoryError) as error:
        return f"it is broken: {printable(str(error))}"


def _parquet(content: bytes) -> pa.Table | str:
    """Return the file's rows, or why they are not rows of this version."""
    parquet = pq.ParquetFile(pa.BufferReader(content), pre_buffer=False)
    metadata, names = parquet.metadata.metadata or {}, parquet.schema_arrow.names
    if MARKER in metadata:
        versions = {int(metadata[MARKER])}
    else:  # a program that rewrites a file, such as pandas or DuckDB, keeps the column only
        if lacking := [name for name in ("row_id", "schema_version") if name not in names]:
            return f"it is not tpbench's: it has no column {' and no column '.join(lacking)}"
        versions = set(parquet.read(columns=["schema_version"]).column(0).to_pylist())
    if versions != {SCHEMA_VERSION}:
        stored = ", ".join(map(str, versions))
        return f"it has version {stored} of the schema, and this tpbench reads {SCHEMA_VERSION}"
    table = parquet.read(use_threads=False).replace_schema_metadata(None)
    return table.drop_columns([name for name in _ADDED if name in names])
