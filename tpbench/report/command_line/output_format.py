"""Output of a report to the screen or to a file, whose suffix can name the format."""

from __future__ import annotations

import sys
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


def print_or_write(content: str | bytes, output: Path | None) -> None:
    """Print a text or the bytes of a picture, or write them to a file."""
    if output is not None:
        output.write_bytes(content if isinstance(content, bytes) else content.encode())
    elif isinstance(content, bytes):
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
    else:
        sys.stdout.write(content)
        sys.stdout.flush()
