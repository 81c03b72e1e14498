"""`scripts/report.py`: from rows on disk to a table on the screen, a page or a picture."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
from rich.console import Console

from tpbench.report import plots, render
from tpbench.report.documents import documents
from tpbench.report.layout import lay_out
from tpbench.report.metric import METRICS, metric
from tpbench.report.pivot import pivot
from tpbench.report.records import say
from tpbench.report.rows import read_rows
from tpbench.report.study import Sheet, columns, sheets, studies
from tpbench.report.table import Report
from tpbench.results.schema import all_columns
from tpbench.results.upgrade import present_name, present_value
from tpbench.settings import JobError, unknown

STUDIES: dict[str, Callable[[Sequence[Sheet]], str]] = {
    "text": lambda found: f"{render.study_text(found).plain}\n",
    "markdown": render.study_markdown,
    "csv": render.study_comma_separated,
}
TABLES: dict[str, Callable[[Report], str]] = {
    "text": lambda report: f"{render.text(report).plain}\n",
    "markdown": render.markdown,
    "csv": render.comma_separated,
}
PICTURES = ("png", "svg")
FORMATS = (*TABLES, "html", *PICTURES, "json")
FILTERS = ("workload", "variant", "loss", "dtype", "device", "gpu_name")
EPILOG = (
    "`report.py compare BEFORE AFTER` says what got slower between two sets of rows: see `report.py compare --help`."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 0, or 2 for what cannot be answered (`compare` adds 1: slower)."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == ["compare"]:
        from tpbench.report.compare import command

        return command.main(arguments[1:])
    asked = _parser().parse_args(arguments)
    try:
        metric(asked.metric)  # before the wait for the rows
        if asked.format == "json":
            documents(_rows(asked), asked.output or Path(), all_rows=asked.all)
        else:
            _write(_make(asked), asked)
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (JobError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="report.py", description="Measured rows as tables of variants side by side.", epilog=EPILOG
    )
    parser.add_argument("where", nargs="*", default=["outputs"], help="folders, files or globs of rows (outputs)")
    parser.add_argument("--metric", default="time_ms", metavar="NAME", help=f"one of: {', '.join(METRICS)} (time_ms)")
    for name in FILTERS:
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, metavar="A,B", help=f"only rows of these, separated by commas: {name}")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME=VALUE", help="only rows with this in a column")
    parser.add_argument("--format", default="text", choices=FORMATS, help="(text)")
    parser.add_argument("--plot", metavar="NAME", help=f"with png or svg, one of: {', '.join(plots.PLOTS)}")
    parser.add_argument(
        "--study", metavar="NAME", help=f"several numbers of each cell side by side, one of: {', '.join(studies())}"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write there, not to the screen (json: a folder)"
    )
    parser.add_argument("--all", action="store_true", help="every row, not only the newest of each cell")
    return parser


def _make(asked: argparse.Namespace) -> str | bytes:
    """What was asked for, as text or as a picture's bytes."""
    picture = asked.format in PICTURES
    if picture != (asked.plot is not None):
        raise JobError("a picture needs both: --format png or svg, and --plot NAME")
    if picture and asked.plot not in plots.PLOTS:
        raise JobError(unknown("plot", asked.plot, plots.PLOTS))
    if asked.study is not None:
        needed = columns(asked.study)
        if asked.format not in STUDIES:
            raise JobError(f"--study is for --format {', '.join(STUDIES)}; a page has the studies that its rows allow")
    if asked.format in ("png", "html") and asked.output is None and sys.stdout.isatty():
        raise JobError(f"--format {asked.format} is for a file: say -o report.{asked.format}")
    frame = _rows(asked)
    if picture:
        return plots.picture(lay_out(frame, plots.NEEDS, all_rows=asked.all), asked.plot, asked.format)
    if asked.study is not None:
        return STUDIES[asked.format](sheets(lay_out(frame, needed, all_rows=asked.all), asked.study))
    if asked.format == "html":
        from tpbench.report.page.document import page

        return page(frame, asked.metric, all_rows=asked.all)
    report = pivot(frame, asked.metric, all_rows=asked.all)
    for warning in report.warnings:
        print(f"report: warning: {warning}", file=sys.stderr)
    if asked.format == "text" and asked.output is None:
        console = Console()  # knows whether this is a terminal, and its colours
        with console.capture() as capture:  # rich would end the process where the reader has left
            render.show(render.text(report), console)
        return capture.get()
    return TABLES[asked.format](report)


def _rows(asked: argparse.Namespace) -> pd.DataFrame:
    """The rows that the command was pointed at and does not leave out."""
    frame = read_rows(asked.where)
    for name in FILTERS:
        wanted = getattr(asked, name)
        if wanted is not None:
            frame = _only(frame, name, wanted.split(","))
    for each in asked.only:
        name, _, value = each.partition("=")
        if present_name(name) not in frame:
            raise JobError(unknown("column", name, all_columns()))
        frame = _only(frame, present_name(name), [present_value(name, value)])
    return frame


def _only(frame: pd.DataFrame, name: str, wanted: list[str]) -> pd.DataFrame:
    written = frame[name].map(say)
    for value in wanted:
        if value not in set(written):
            raise JobError(f"in these rows, {unknown(name, value, set(written[frame[name].notna()]))}")
    return frame[written.isin(wanted)]


def _write(made: str | bytes, asked: argparse.Namespace) -> None:
    if asked.output is not None:
        asked.output.write_bytes(made if isinstance(made, bytes) else made.encode())
        print(f"report: wrote {asked.output}", file=sys.stderr)
    elif isinstance(made, bytes):
        sys.stdout.buffer.write(made)
        sys.stdout.buffer.flush()
    else:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # a name that this terminal cannot show: no failure
        sys.stdout.write(made)
        sys.stdout.flush()
