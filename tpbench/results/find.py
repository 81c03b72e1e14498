"""Search for the files that hold rows."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

Where: TypeAlias = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""A folder, a file, a glob, or several of these."""


def row_files(where: Where) -> list[Path]:
    """Return every Parquet file that `where` names, sorted, without duplicates.

    Folders are searched recursively. Hidden names are temporary files and are skipped. Raises FileNotFoundError for a
    name that matches nothing.
    """
    places = [where] if isinstance(where, (str, os.PathLike)) else list(where)
    return sorted({path.absolute() for place in places for path in _expand(Path(place))})


def _expand(place: Path) -> Iterable[Path]:
    # A name that exists is no pattern, even with an asterisk in it. Path.glob accepts no absolute pattern.
    matches = [place] if place.exists() else [Path(match) for match in glob.glob(str(place), recursive=True)]  # noqa: PTH207
    if not matches:
        raise FileNotFoundError(f"no such folder or file: {place}")
    return [path for match in matches for path in (_search(match) if match.is_dir() else [match])]


def _search(folder: Path) -> Iterable[Path]:
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            if name.endswith(".parquet") and not name.startswith("."):
                yield Path(parent, name)
