"""What `python -m tpbench` says when it is not asked to run anything. Knows no torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def answer(arguments: Sequence[str]) -> int | None:
    """The exit code, if the arguments ask for words and not for a run; else None."""
    try:
        code = _answer(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _answer(arguments: Sequence[str]) -> int | None:
    if {"-h", "--help"} & set(arguments):
        from tpbench.console.help import HELP

        print(HELP, end="")
        return 0
    if arguments and arguments[0] == "list":
        from tpbench.console.listing import main as show_list

        return show_list(arguments[1:])
    if arguments and arguments[0] == "doctor":
        from tpbench.console.doctor import main as examine

        return examine(arguments[1:])
    return None
