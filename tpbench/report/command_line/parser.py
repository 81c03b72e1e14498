"""Parser of the report's command lines. It answers an unknown option with the option or the filter that was meant."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from tpbench.results.schema import all_columns
from tpbench.suggestions import SYNONYMS, nearest

_UNKNOWN = "unrecognized arguments: "
"""Start of argparse's message for unknown options."""


_SCRIPT, _INSTALLED = "report.py", "tpbench-report"
"""The names of the command in a checkout and in an environment with the installed package."""


class ReportParser(argparse.ArgumentParser):
    """Parser whose message for an unknown option is one line, and which names the command as the user did."""

    def __init__(self, command: str = "", *, description: str, epilog: str | None = None) -> None:
        """`command`: the name of a command with options of its own. Empty: the report itself."""
        program = _INSTALLED if Path(sys.argv[0]).name == _INSTALLED else _SCRIPT
        super().__init__(prog=f"{program} {command}".rstrip(), description=description, epilog=epilog)

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with 2."""
        option = message.removeprefix(_UNKNOWN).split()[0]
        if not message.startswith(_UNKNOWN) or not option.startswith("-"):
            super().error(message)
        name = option.lstrip("-").partition("=")[0]
        column = SYNONYMS.get(name, name.replace("-", "_"))
        if "--only" in self._option_string_actions and column in all_columns():
            meant = f": --only {column}=VALUE selects rows"
        else:
            known = [each.lstrip("-") for each in self._option_string_actions]
            meant = nearest(name, known).replace("did you mean ", "did you mean --")
        self.exit(2, f"{self.prog}: no option is called {option}{meant} ({self.prog} --help lists all)\n")
