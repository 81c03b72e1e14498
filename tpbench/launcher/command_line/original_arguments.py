"""The command line as the user typed it. `sys.argv` holds the one that Hydra gets, which is rewritten."""

from __future__ import annotations

import sys
from collections.abc import Sequence

_original: list[str] = []


def remember(arguments: Sequence[str]) -> None:
    """Remember the arguments before they are rewritten."""
    _original[:] = arguments


def get() -> list[str]:
    """Return the remembered arguments, or those of this process if none were remembered."""
    return _original or sys.argv[1:]
