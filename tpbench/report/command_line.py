"""Parts that all report commands share: their options, the rows that these select, and the file of the output."""

from __future__ import annotations

import argparse
import io
import itertools
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pandas as pd

from tpbench.report.analysis.metrics import Metric, metrics_of_all
from tpbench.report.analysis.records import value_text
from tpbench.results.read import RowWarning, load
from tpbench.results.schema import COLUMN_LIST, all_columns
from tpbench.settings import JobError
from tpbench.suggestions import SYNONYMS, nearest, unknown

FILTERS = ("workload", "variant", "label", "loss", "dtype", "device", "gpu_name")
SUFFIXES = {
    ".txt": "text",
    ".md": "markdown",
    ".csv": "csv",
    ".html": "html",
    ".htm": "html",
    ".png": "png",
    ".svg": "svg",
}
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
        """Print the message, with the option or filter that was meant, and exit with 2."""
        option = message.removeprefix(_UNKNOWN).split()[0]
        if not message.startswith(_UNKNOWN) or not option.startswith("-"):
            super().error(message)
        name = option.lstrip("-").partition("=")[0]
        column = SYNONYMS.get(name, name.replace("-", "_"))
        if "--only" in self._option_string_actions and column in all_columns():
            meant = f": --only {column}=VALUE selects rows"
        else:
            options = [option.lstrip("-") for option in self._option_string_actions]
            meant = nearest(name, options).replace("did you mean ", "did you mean --")
        self.exit(2, f"{self.prog}: no option is called {option}{meant} ({self.prog} --help lists all)\n")


def add_filters(parser: argparse.ArgumentParser) -> None:
    """Add the places of the rows and the filters to a command."""
    parser.add_argument("where", nargs="*", default=["outputs"], help="folders, files or globs of rows (outputs)")
    for name in FILTERS:
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, metavar="A,B", help=f"only rows with one of these in the column {name}")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME=A,B", help="only rows with one of these in a column"
    )


def read_rows(places: Sequence[str]) -> pd.DataFrame:
    """Return the rows in `places`: folders, files or globs. Raises JobError if there are none.

    Warnings about files go to stderr.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RowWarning)
        try:
            frame = load(places)
        except FileNotFoundError as error:
            raise JobError(f"{error}: run `python -m tpbench ...` first, or name the folder") from None
    for warning in caught:
        print(f"report: warning: {warning.message}", file=sys.stderr)
    if frame.empty:
        raise JobError(f"no rows in {', '.join(places)}: run `python -m tpbench ...` first")
    return frame


def selected_rows(options: argparse.Namespace) -> pd.DataFrame:
    """Return the rows that the filters select. Raises JobError for a filter that no row passes."""
    frame = read_rows(options.where)
    for name in FILTERS:
        wanted = getattr(options, name)
        if wanted is not None:
            frame = _only(frame, name, wanted.split(","))
    for name, value in parse_conditions(options.only):
        if name not in frame:
            if name in all_columns():
                raise JobError(f"none of these rows has the column {name}, which is of another workload")
            raise JobError(unknown("column", name, all_columns(), COLUMN_LIST))
        is_one_value = value in set(frame[name].map(value_text))  # a value may contain a comma
        frame = _only(frame, name, [value] if is_one_value else value.split(","))
    return frame


def _only(frame: pd.DataFrame, name: str, wanted: list[str]) -> pd.DataFrame:
    texts = frame[name].map(value_text)
    for value in wanted:
        if value not in set(texts):
            raise JobError(f"in these rows, {unknown(name, value, set(texts[frame[name].notna()]))}")
    return frame[texts.isin(wanted)]


def parse_conditions(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Return name and value of each condition of `--only`.

    Raises JobError with the right line for one without an equals sign.
    """
    for name, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        if "=" not in name:
            value = "" if "=" in following else following
            right = f"{name}={value or 'VALUE'}"
            raise JobError(f"--only {f'{name} {value}'.strip()}: the equals sign is missing: write --only {right}")
    return [(name, value) for name, _, value in (condition.partition("=") for condition in arguments)]


def require_values(frame: pd.DataFrame, shown: Metric, where: str = "") -> None:
    """Raise JobError if no correct row has the metric. If no row is correct, a report shows the failures."""
    measured = frame[frame["status"] == "ok"]
    present = [name for name in metrics_of_all() if name in measured and measured[name].notna().any()]
    if measured.empty or shown.name in present:
        return
    raise JobError(f"no row{where and f' of {where}'} has {shown.name} ({shown.doc}); they have: {', '.join(present)}")


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
    """Print a text or the bytes of a picture, or write them to a file and name it."""
    if output is not None:
        output.write_bytes(content if isinstance(content, bytes) else content.encode())
        print(f"report: wrote {output}", file=sys.stderr)
    elif isinstance(content, bytes):
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
    else:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # for characters that the terminal cannot show
        sys.stdout.write(content)
        sys.stdout.flush()
