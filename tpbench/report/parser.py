"""Parser of the report's command lines. It answers an unknown option with the option or the filter that was meant."""

from __future__ import annotations

import argparse
from typing import NoReturn

from tpbench.results.schema import all_columns
from tpbench.results.upgrade import present_name
from tpbench.settings import SYNONYMS, nearest

_UNKNOWN = "unrecognized arguments: "
"""Start of argparse's message for unknown options."""


class ReportParser(argparse.ArgumentParser):
    """Parser whose message for an unknown option is one line."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with 2."""
        option = message.removeprefix(_UNKNOWN).split()[0]
        if not message.startswith(_UNKNOWN) or not option.startswith("-"):
            super().error(message)
        name = option.lstrip("-").partition("=")[0]
        column = SYNONYMS.get(name, present_name(name.replace("-", "_")))
        if "--only" in self._option_string_actions and column in all_columns():
            meant = f": --only {column}=VALUE selects rows"
        else:
            known = [each.lstrip("-") for each in self._option_string_actions]
            meant = nearest(name, known).replace("did you mean ", "did you mean --")
        self.exit(2, f"{self.prog}: no option is called {option}{meant} ({self.prog} --help lists all)\n")
