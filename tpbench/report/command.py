"""`scripts/report.py`: tables, pages and pictures made from rows."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
from rich.console import Console

from tpbench.report import plots
from tpbench.report.command_line.output_format import format_of
from tpbench.report.command_line.parser import ReportParser
from tpbench.report.command_line.rows import require_values
from tpbench.report.command_line.selection import add_filters, selected_rows
from tpbench.report.conclusions.agreement import frame_warnings
from tpbench.report.grids.arrange import arrange_rows
from tpbench.report.json_documents import write_documents
from tpbench.report.numbers.metric import METRICS, metric
from tpbench.report.repeat import repeat
from tpbench.report.tables import render, writer
from tpbench.report.tables.columns import column_tables, parse_columns
from tpbench.report.tables.pivot import pivot
from tpbench.report.tables.pivot_report import PivotReport
from tpbench.report.tables.study import check_study, studies, study_csv, study_document, study_picture, study_tables
from tpbench.settings import JobError
from tpbench.suggestions import nearest, unknown
from tpbench.workloads.study_data import StudyTable

STUDIES: dict[str, Callable[[Sequence[StudyTable], Sequence[str]], str]] = {
    "text": lambda tables, warnings: f"{writer.as_text(study_document(tables, warnings)).plain}\n",
    "markdown": lambda tables, warnings: writer.as_markdown(study_document(tables, warnings)),
    "csv": study_csv,
}
TABLES: dict[str, Callable[[PivotReport], str]] = {
    "text": lambda report: f"{render.text(report).plain}\n",
    "markdown": render.markdown,
    "csv": render.comma_separated,
}
PICTURES = ("png", "svg")
FORMATS = (*TABLES, "html", *PICTURES, "json")
COMMANDS = {"compare": "tpbench.report.compare.command", "history": "tpbench.report.history"}
"""Commands with options of their own, with their modules."""
EPILOG = (
    "`report.py compare BEFORE AFTER` says what got slower between two sets of rows. `report.py history` "
    "shows a metric over time, by commit and package. Each has a --help."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. The exit code is 0, or 2 for a wrong request. `compare` and `--run` add 1 for a slower cell."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments and arguments[0] in COMMANDS:
        command: Callable[[Sequence[str]], int]
        command = importlib.import_module(COMMANDS[arguments[0]]).main
        return command(arguments[1:])
    if arguments and not Path(arguments[0]).exists() and (meant := nearest(arguments[0], COMMANDS)):
        print(f"report: no folder and no command is called {arguments[0]}{meant}", file=sys.stderr)
        return 2
    options = _parser().parse_args(arguments)
    try:
        metric(options.metric or "time_ms")  # an unknown metric is reported before rows are read
        if options.repeat is not None:
            return repeat(selected_rows(options), options.repeat, run=options.run, metric=options.metric or "time_ms")
        if options.run is not None:
            raise JobError("--run needs --repeat ROW_ID")
        options.format = options.format or format_of(options.output)
        if options.format == "json":
            write_documents(selected_rows(options), options.output or Path(), all_rows=options.all)
        else:
            _write(_content(options), options)
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (JobError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = ReportParser(description="Measured rows as tables of variants side by side.", epilog=EPILOG)
    add_filters(parser)
    parser.add_argument(
        "--metric",
        metavar="NAME",
        help=f"one of: {', '.join(METRICS)}, or a number that a workload adds; an unknown name lists all (time_ms; in "
        "a page device_ms of rows that have it)",
    )
    parser.add_argument("--format", choices=FORMATS, help="(that of the suffix of -o, else text)")
    parser.add_argument("--plot", metavar="NAME", help=f"with png or svg, one of: {', '.join(plots.PLOTS)}")
    parser.add_argument(
        "--study",
        metavar="NAME",
        help=f"several numbers of each cell, or tables computed from them: {', '.join(studies())}",
    )
    parser.add_argument(
        "--columns",
        metavar="A,B/C",
        help="a line for each cell with these columns of its row, or ratios of two; with --study, of its workload",
    )
    parser.add_argument("--floor", action="store_true", help="in a table of times, also the time of unavoidable bytes")
    parser.add_argument("--transpose", action="store_true", help="a line for each variant, a column for each problem")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write there, not to the screen (json: a folder)"
    )
    parser.add_argument("--repeat", metavar="ROW_ID", help="print the command that measures the cell of a row again")
    parser.add_argument(
        "--run",
        nargs="?",
        const="",
        metavar="variant=FILE.py:NAME",
        help="with --repeat: run the command, and compare the rows. Name a variant of your own: no row loads code",
    )
    parser.add_argument("--all", action="store_true", help="every row, not only the newest of each cell")
    return parser


def _content(options: argparse.Namespace) -> str | bytes:
    """Return the report as text, or as the bytes of a picture."""
    columns = None if options.columns is None else parse_columns(options.columns)
    _check(options, with_columns=bool(columns))
    frame = selected_rows(options)
    if columns or options.study is not None:
        return _study(frame, columns, options)
    if options.format in PICTURES:
        return plots.picture(arrange_rows(frame, plots.COLUMNS, all_rows=options.all), options.plot, options.format)
    if options.metric is not None:
        require_values(frame, metric(options.metric))
    if options.format == "html":
        from tpbench.report.page.html_page import page

        return page(frame, options.metric, all_rows=options.all)
    report = pivot(
        frame, options.metric or "time_ms", all_rows=options.all, floor=options.floor, transpose=options.transpose
    )
    _warn(report.warnings, options)
    if options.format == "text" and options.output is None:
        console = Console()  # detects a terminal and its colours
        with console.capture() as capture:  # rich itself would end the process if the pipe is closed
            render.show(render.text(report), console)
        return capture.get()
    return TABLES[options.format](report)


def _check(options: argparse.Namespace, *, with_columns: bool) -> None:
    """Raise JobError for options that do not fit together."""
    is_picture = options.format in PICTURES
    if with_columns and options.format not in STUDIES:
        raise JobError(f"--columns is for --format {', '.join(STUDIES)}")
    is_metric_table = options.format in TABLES and not with_columns and options.study is None
    if (options.floor or options.transpose) and not is_metric_table:
        raise JobError(f"--floor and --transpose are for tables of one metric, as --format {', '.join(TABLES)}")
    if options.study is not None:
        check_study(options.study)
        if options.plot is not None or options.format not in (*STUDIES, *PICTURES):
            valid = ", ".join((*STUDIES, *PICTURES))
            raise JobError(f"--study is for --format {valid}; a page has the studies that its rows allow")
    elif is_picture != (options.plot is not None):
        raise JobError("a picture needs both: --format png or svg, and --plot NAME")
    elif is_picture and options.plot not in plots.PLOTS:
        raise JobError(unknown("plot", options.plot, plots.PLOTS))
    if options.format in ("png", "html") and options.output is None and sys.stdout.isatty():
        raise JobError(f"--format {options.format} is for a file: say -o report.{options.format}")


def _study(frame: pd.DataFrame, columns: Sequence[str] | None, options: argparse.Namespace) -> str | bytes:
    """Return the tables of chosen columns or of a study, or its picture."""
    if options.study is not None and options.format in PICTURES:
        return plots.study_picture(study_picture(frame, options.study), options.study, options.format)
    if options.study is not None:
        frame = frame[frame["workload"].isin(studies()[options.study])]
    if columns:
        tables = column_tables(frame, columns, options.study, all_rows=options.all)
    else:
        tables = study_tables(frame, options.study, all_rows=options.all)
    warnings = frame_warnings(frame, all_rows=options.all)
    _warn(warnings, options)
    return STUDIES[options.format](tables, warnings)


def _warn(warnings: Sequence[str], options: argparse.Namespace) -> None:
    """Print warnings to stderr, unless the same terminal shows them below the tables."""
    if (
        options.output is None
        and options.format in ("text", "markdown")
        and sys.stdout.isatty()
        and sys.stderr.isatty()
    ):
        return
    for warning in warnings:
        print(f"report: warning: {warning}", file=sys.stderr)


def _write(content: str | bytes, options: argparse.Namespace) -> None:
    if options.output is not None:
        options.output.write_bytes(content if isinstance(content, bytes) else content.encode())
        print(f"report: wrote {options.output}", file=sys.stderr)
    elif isinstance(content, bytes):
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
    else:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # for characters that the terminal cannot show
        sys.stdout.write(content)
        sys.stdout.flush()
