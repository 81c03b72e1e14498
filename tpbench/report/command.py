"""`scripts/report.py`: from rows on disk to a table on the screen or in a file."""

from __future__ import annotations

import argparse
import io
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
from rich.console import Console

from tpbench.fields import JobError, unknown
from tpbench.report import render
from tpbench.report.metric import METRICS, metric
from tpbench.report.pivot import pivot
from tpbench.report.table import Report
from tpbench.results.read import RowWarning, load

FORMATS: dict[str, Callable[[Report], str]] = {
    "text": lambda report: f"{render.text(report).plain}\n",
    "markdown": render.markdown,
    "csv": render.comma_separated,
    "html": render.page,
}
FILTERS = ("workload", "variant", "loss")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 0, or 2 for what cannot be answered."""
    asked = _parser().parse_args(arguments)
    try:
        metric(asked.metric)  # before the wait for the rows
        report = pivot(_rows(asked), asked.metric, all_rows=asked.all)
        for warning in report.warnings:
            print(f"report: warning: {warning}", file=sys.stderr)
        _write(report, asked.format, asked.output)
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (JobError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="report.py", description="Measured rows as tables of variants side by side.")
    parser.add_argument("where", nargs="*", default=["outputs"], help="folders, files or globs of rows (outputs)")
    parser.add_argument("--metric", default="time_ms", metavar="NAME", help=f"one of: {', '.join(METRICS)} (time_ms)")
    for name in FILTERS:
        parser.add_argument(f"--{name}", metavar="A,B", help=f"only rows of these, separated by commas: {name}")
    parser.add_argument("--format", default="text", choices=FORMATS, help="(text)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write there instead of to the screen")
    parser.add_argument("--all", action="store_true", help="every row, not only the newest of each cell")
    return parser


def _rows(asked: argparse.Namespace) -> pd.DataFrame:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RowWarning)
        try:
            frame = load(asked.where)
        except FileNotFoundError as error:
            raise JobError(f"{error}: run `python -m tpbench ...` first, or name the folder") from None
    for warning in caught:
        print(f"report: warning: {warning.message}", file=sys.stderr)
    if frame.empty:
        raise JobError(f"no rows in {', '.join(asked.where)}: run `python -m tpbench ...` first")
    for name in FILTERS:
        wanted = getattr(asked, name)
        if wanted is not None:
            frame = _only(frame, name, wanted.split(","))
    return frame


def _only(frame: pd.DataFrame, name: str, wanted: list[str]) -> pd.DataFrame:
    present = set(frame[name].dropna())
    for value in wanted:
        if value not in present:
            raise JobError(f"in these rows, {unknown(name, value, present)}")
    return frame[frame[name].isin(wanted)]


def _write(report: Report, form: str, output: Path | None) -> None:
    if output is not None:
        output.write_text(FORMATS[form](report), encoding="utf-8")
        print(f"report: wrote {output}", file=sys.stderr)
        return
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name that this terminal cannot show is no reason to fail
    made = FORMATS[form](report)
    if form == "text":
        console = Console()  # knows whether this is a terminal, and its colours
        with console.capture() as capture:  # rich would end the process where the reader has left
            render.show(render.text(report), console)
        made = capture.get()
    sys.stdout.write(made)
    sys.stdout.flush()
