"""Explain an operating system's error about the output folder: Hydra makes that folder before any job is planned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tpbench.job import Job

OPTION = "output_dir"


def folder_error(error: OSError, arguments: Sequence[str]) -> str:
    """Return the message for an error, with the name of the output folder if the error is about that folder."""
    given = [each.partition("=")[2] for each in arguments if each.lstrip("+").startswith(f"{OPTION}=")]
    folders = (given[-1] if given else Job.output_dir).split(",")
    for folder in (each.strip("'\" ") for each in folders):
        if error.filename is not None and _related(Path(folder), Path(str(error.filename))):
            return f"{OPTION}={folder} cannot be written: {error.strerror} ({error.filename}); set another {OPTION}=DIR"
    return str(error)


def _related(one: Path, other: Path) -> bool:
    """Return whether the paths are equal or one of them contains the other."""
    one, other = one.absolute(), other.absolute()
    return one.is_relative_to(other) or other.is_relative_to(one)
