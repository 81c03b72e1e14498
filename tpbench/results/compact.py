"""Merge the files of single rows into one, which is smaller and read faster, while no sweep writes to the folder.

A reader sees every row once at any moment: the merged file appears first, and a row that is found twice counts once.
Rows of status error and timeout stay in their files, because a sweep may retry these cells and delete the rows.
"""

import argparse
import os
import re
import secrets
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from tpbench.files import replace_file, sync_folder
from tpbench.results.read import read_table
from tpbench.results.row_files import Where, row_files
from tpbench.results.write import parquet_bytes
from tpbench.settings import JobError, user_path

_MERGED = re.compile("merged-[0-9a-f]{16}")
"""Names of merged files without their suffix. The names of row files begin with a time."""
KEPT = ("error", "timeout")
"""Statuses of rows that stay in files of their own."""


def compact(output_dir: str | os.PathLike[str]) -> tuple[str, list[str]]:
    """Merge the rows of OUTPUT_DIR into one file. Return a sentence, and complaints about files.

    Raises FileNotFoundError if there are no rows.
    """
    rows = Path(output_dir, "rows")
    files = [path for path in row_files(rows) if path.parent == rows.absolute()]
    table, read, complaints = read_table(files)
    table = table.filter(pc.invert(pc.is_in(table["status"], pa.array(KEPT))))
    # Merged files, and single files that are named after their row: a file that a user has renamed stays.
    names = set(table["row_id"].to_pylist())
    going = [path for path in read if _MERGED.fullmatch(path.stem) or path.stem in names]
    if len(going) > 1:
        _write_merged(table, rows)
        for path in going:
            path.unlink(missing_ok=True)
        sync_folder(rows)
    left = len(files) - max(0, len(going) - 1)
    return f"{len(table)} rows merged; {len(files)} files before, {left} now", complaints


def remove_rows(where: Where, row_ids: Collection[str]) -> None:
    """Delete the rows of these names. The other rows of their files go to files of their own first."""
    for path in row_files(where):
        table, read, _ = read_table(path)
        gone = pc.fill_null(pc.is_in(table["row_id"], pa.array(row_ids)), False)
        if read and pc.any(gone).as_py():
            if len(others := table.filter(pc.invert(gone))):
                _write_merged(others, path.parent)
            path.unlink(missing_ok=True)
            sync_folder(path.parent)


def copy_rows(where: Where, row_ids: Collection[str], output_dir: Path) -> Path:
    """Write the rows of these names to one file of another output folder, and return its path."""
    table, *_ = read_table(where)
    folder = output_dir / "rows"
    folder.mkdir(parents=True, exist_ok=True)
    return _write_merged(table.filter(pc.is_in(table["row_id"], pa.array(row_ids))), folder)


def _write_merged(table: pa.Table, folder: Path) -> Path:
    file = folder / f"merged-{secrets.token_hex(8)}.parquet"
    replace_file(file, parquet_bytes(table, compressed=True))
    return file


def main(arguments: Sequence[str]) -> int:
    """Run `python -m tpbench compact`. Return 0. Raises JobError without rows, OSError if they cannot be merged."""
    parser = argparse.ArgumentParser(
        prog="tpbench compact",
        description="Merge the rows of an output folder into one file, which reads faster. No sweep may run there.",
    )
    parser.add_argument("output_dir", type=user_path, nargs="?", default="outputs", help="default: outputs")
    try:
        done, complaints = compact(parser.parse_args(arguments).output_dir)
    except FileNotFoundError as error:
        raise JobError(f"{error}: name the output_dir of a sweep") from None
    for complaint in complaints:
        print(f"tpbench: {complaint}", file=sys.stderr)
    print(done)
    return 0
