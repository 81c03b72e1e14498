"""The format of a report's file, from the suffix of its name."""

from __future__ import annotations

from pathlib import Path

from tpbench.settings import JobError

SUFFIXES = {
    ".txt": "text",
    ".md": "markdown",
    ".csv": "csv",
    ".html": "html",
    ".htm": "html",
    ".png": "png",
    ".svg": "svg",
}


def format_of(output: Path | None) -> str:
    """Return the format that the name of a file asks for: text for the screen and for a name without a suffix.

    Raises JobError for a suffix that no format has.
    """
    suffix = "" if output is None else output.suffix.lower()
    if suffix == ".json":
        raise JobError(f"-o {output}: JSON is a file for each row, in a folder: write --format json -o FOLDER")
    if suffix and suffix not in SUFFIXES:
        raise JobError(f"-o {output}: no format has the suffix {suffix}: use {', '.join(SUFFIXES)}, or name a --format")
    return SUFFIXES.get(suffix, "text")
