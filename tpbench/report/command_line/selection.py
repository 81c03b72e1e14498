"""Selection of rows by the options that all report commands share."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence

import pandas as pd

from tpbench.report.command_line.rows import read_rows
from tpbench.report.grids.records import value_text
from tpbench.results.schema import COLUMN_LIST, all_columns
from tpbench.settings import JobError
from tpbench.suggestions import unknown

FILTERS = ("workload", "variant", "label", "loss", "dtype", "device", "gpu_name")


def add_filters(parser: argparse.ArgumentParser) -> None:
    """Add the places of the rows and the filters to a command."""
    parser.add_argument("where", nargs="*", default=["outputs"], help="folders, files or globs of rows (outputs)")
    for name in FILTERS:
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, metavar="A,B", help=f"only rows with one of these in the column {name}")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME=A,B", help="only rows with one of these in a column"
    )


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
        texts = set(frame[name].map(value_text))
        frame = _only(frame, name, values_of(value, texts))
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
    return [(name, value) for name, _, value in (each.partition("=") for each in arguments)]


def values_of(text: str, present: set[str]) -> list[str]:
    """Return the values that a condition names: the whole text if rows have it, else its parts between commas."""
    return [text] if text in present or "," not in text else text.split(",")
