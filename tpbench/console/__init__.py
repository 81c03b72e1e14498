"""Commands of `python -m tpbench` that run no job: help, list, new and doctor. Nothing here imports torch.

The modules, in the order of a first reading:

- Help: `help` is one screen of text.
- List: `listing` prints choices, `overview` the names of all on one screen, and `choice` all that is known of one.
  `topics` are what it can list, and `entries` the choices with their availability. `fields` are the fields of jobs,
  and `defaults` their defaults.
- New: `new` writes a variant to start from.
- Doctor: `doctor` prints problems of this machine. `checks` need no torch, and `torch_probe` runs in its own process.
- Runs: `plan` is the text of a dry run, `quick_start` the end of `scripts/run`.
- Pages: `pages` writes the tables of the pages, and `page_figures` checks the figures in their text. `reference`
  writes the page of all fields, and `conf_comments` the comments in conf/.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def information(arguments: Sequence[str]) -> int | None:
    """Run the command that the arguments name and return its exit code, or return None if they name a job."""
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(arguments: Sequence[str]) -> int | None:
    if arguments and arguments[0] == "new":  # it has a --help of its own
        from tpbench.console import new

        return new.main(arguments[1:])
    if {"-h", "--help"} & set(arguments) or list(arguments) == ["help"]:
        from tpbench.console.help import HELP

        print(HELP, end="")
        return 0
    if arguments and arguments[0] == "list":
        from tpbench.console import listing

        return listing.main(arguments[1:])
    if arguments and arguments[0] == "doctor":
        from tpbench.console import doctor

        return doctor.main(arguments[1:])
    return None
