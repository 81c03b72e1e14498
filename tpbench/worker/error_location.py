"""The file and line of an error, for the reason of a row."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

import tpbench
from tpbench.workloads.returned import WrongReturn

_PACKAGE = Path(tpbench.__file__).resolve().parent
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def location(error: BaseException) -> str:
    """Return `FILE:LINE (FUNCTION)` of the innermost call outside of libraries, or an empty string if there is none.

    For a variant that returned a wrong type it is the line of the variant.

    The file is relative to the folder of this package, or a name alone: a row must not hold a user's folders.
    """
    if isinstance(error, WrongReturn):
        return f"{_short(Path(error.file))}:{error.line}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        own = path.resolve().is_relative_to(_PACKAGE)
        if own or (path.exists() and not str(path.resolve()).startswith(_LIBRARIES)):
            return f"{_short(path)}:{frame.lineno} ({frame.name})"
    return ""


def _short(path: Path) -> str:
    """Return the path of a file of this package relative to the package's folder, else the file's name."""
    path = path.resolve()
    return str(path.relative_to(_PACKAGE.parent)) if path.is_relative_to(_PACKAGE) else path.name
