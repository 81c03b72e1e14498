"""`tpbench report`: tables, pages and pictures made from rows."""

import argparse
import shlex
import sys
from collections.abc import Sequence

import pandas as pd

from tpbench.measure.machine import RECORDED_VARIABLES
from tpbench.report import command_line
from tpbench.report.analysis.grid import arrange_rows
from tpbench.report.analysis.pairs import OF_PLACE
from tpbench.report.analysis.row_values import METRICS
from tpbench.report.command_line import TABLES
from tpbench.report.pivot import pivot
from tpbench.report.plots import PLOTS, plot
from tpbench.report.studies import studies, study_document, study_picture
from tpbench.results.current_rows import json_object, newest
from tpbench.results.read import plain_rows
from tpbench.settings import JobError
from tpbench.suggestions import unknown
from tpbench.tables import Document
from tpbench.workloads.study_data import Picture


def main(arguments: Sequence[str]) -> int:
    """Run the command. The exit code is 0. Raises JobError or OSError for a wrong request."""
    options = _parser().parse(arguments)
    _check(options)
    frame = command_line.selected_rows(options)
    if options.metric is not None:
        command_line.require_values(frame, options.metric)
    content = _content(frame, options)
    if options.repeat is None and (older := len(frame) - len(newest(frame))):
        left_out = f"{older} older {'row is' if older == 1 else 'rows are'} not shown"
        print(f"tpbench: {left_out}, because a newer one is of the same cell: see --only sweep_id=ID", file=sys.stderr)
    command_line.write(content, options, options.study or options.plot or "")
    return 0


def _parser() -> command_line.ReportParser:
    parser = command_line.ReportParser(
        "report",
        (*TABLES, "html", "svg"),
        description="Measured rows as tables of variants side by side.",
        epilog="`tpbench compare BEFORE AFTER` says what got slower between two sets of rows. `tpbench history` shows "
        "a metric over time, by commit and package. Each has a --help.",
    )
    parser.add_filters()
    add = parser.add_argument
    metrics = f"one of: {', '.join(METRICS)}, or a number that a workload adds; an unknown name lists all (time_ms; in "
    add("--metric", metavar="NAME", help=f"{metrics}a page device_ms of rows that have it)")
    add("--plot", metavar="NAME", help=f"with svg, one of: {', '.join(PLOTS)}")
    study = f"several numbers of each cell, or tables computed from them: {', '.join(studies())}"
    add("--study", metavar="NAME", help=study)
    columns = "a line for each cell with these columns of its row, or ratios of two; with --study, of its workload"
    add("--columns", metavar="A,B/C", help=columns)
    add("--floor", action="store_true", help="in a table of times, also the time of unavoidable bytes")
    add("--transpose", action="store_true", help="a line for each variant, a column for each problem")
    add("--repeat", metavar="ROW_ID", help="print the command that measures the cell of a row again")
    return parser


def _check(options: argparse.Namespace) -> None:
    """Raise JobError for options that don't fit together."""
    is_picture, of_cells = options.format == "svg", options.study is not None or options.columns is not None
    for what, name, valid in (("study", options.study, [*studies()]), ("plot", options.plot, [*PLOTS])):
        if name is not None and name not in valid:
            raise JobError(unknown(what, name, valid))
    if (options.plot is not None) != (is_picture and options.study is None):
        raise JobError(f"a picture needs -o FILE.svg, and --study NAME or --plot {'|'.join(PLOTS)}")
    if (options.format == "html" and of_cells) or (is_picture and options.columns is not None):
        raise JobError(f"--columns and --study make tables: choose --format {', '.join(TABLES)}")
    if options.metric is not None and (of_cells or is_picture):
        raise JobError("--columns, --study and --plot choose their own numbers: leave out --metric")
    if (options.floor or options.transpose) and (of_cells or options.format not in TABLES):
        raise JobError(f"--floor and --transpose are for tables of one metric, as --format {', '.join(TABLES)}")
    if options.format == "html" and options.output is None and sys.stdout.isatty():
        raise JobError("--format html is for a file: say -o report.html")


def _content(frame: pd.DataFrame, options: argparse.Namespace) -> Document | Picture | str:
    """Return what the options ask for."""
    if options.repeat is not None:
        return f"{row_command(frame, options.repeat)}\n"
    if options.format == "html":
        from tpbench.report.page.html_page import page

        return page(frame, options.metric)
    if options.format == "svg":
        return study_picture(frame, options.study) if options.study else plot(arrange_rows(frame), options.plot)
    if options.study is not None or options.columns is not None:
        columns = [] if options.columns is None else [*map(str.strip, options.columns.split(","))]
        return study_document(frame, options.study, columns)
    if options.format == "json" and options.metric is None:
        rows = newest(frame).dropna(axis="columns", how="all")
        return f"{rows.to_json(orient='records', indent=2, date_format='iso', double_precision=15)}\n"
    return pivot(frame, options.metric or "time_ms", floor=options.floor, transpose=options.transpose)


def row_command(frame: pd.DataFrame, row_id: str) -> str:
    """Return the command line that measures the cell of a row again, with quotes. Raises JobError if there is none."""
    rows = plain_rows(frame[frame["row_id"].astype(str) == row_id])
    if not rows:
        raise JobError(unknown("row", row_id, frame["row_id"], "--columns row_id"))
    if not (overrides := rows[0].get("overrides")):
        raise JobError(f"row {row_id} doesn't have its command line (overrides): an older version made it")
    recorded = {
        name: str(value)
        for name, value in json_object(rows[0].get("environment")).items()
        if RECORDED_VARIABLES.fullmatch(name) and name not in (*OF_PLACE, "OMP_NUM_THREADS")
    }
    for name, value in {**recorded, "overrides": overrides}.items():
        if not value.isprintable():
            raise JobError(f"no command line can hold the stored value of {name}: it has control characters")
    environment = [f"{name}={shlex.quote(value)}" for name, value in recorded.items()]
    return " ".join([*environment, "python -m tpbench", shlex.join(shlex.split(overrides))])
