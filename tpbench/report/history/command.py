"""`scripts/report.py history FOLDER...`: when a metric changed, at which commit or package, and an exit code for CI."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tpbench.report.analysis.metrics import METRICS, metric
from tpbench.report.command_line import ReportParser, add_filters, print_or_write, require_values, selected_rows
from tpbench.report.compare.command import share
from tpbench.report.history import render
from tpbench.report.history.change_points import ALPHA
from tpbench.report.history.series import all_series
from tpbench.settings import JobError

FORMATS = {"text": render.text, "markdown": render.markdown, "csv": render.comma_separated}


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    The exit code is 1 if the newest level of a cell is worse than the level before it or its newest row failed, and 2
    if no cell has two measurements, because a check of nothing must not pass.
    """
    asked = _parser().parse_args(arguments)
    try:
        shown = metric(asked.metric)
        frame = selected_rows(asked)
        require_values(frame, shown)
        found = all_series(frame, shown, asked.threshold)
        content = FORMATS[asked.format](found, shown, asked.threshold, asked.all)
        print_or_write(content, asked.output)
    except (JobError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    if not any(len(each.rows) > 1 for each in found):
        print("report: no cell was measured twice, so nothing was tested", file=sys.stderr)
        return 2
    return int(any(render.is_worse(each, shown) or each.failure for each in found))


def _parser() -> argparse.ArgumentParser:
    parser = ReportParser(
        "history",
        description="A metric of every cell over time, by commit and by software stack, with the points at which it "
        "changed. Exit code 1 if the newest level of a cell is worse than the one before or its newest row failed, 2 "
        "if no cell was measured twice.",
        epilog=f"A history without changes has a false alarm with a chance of at most {ALPHA:.0%}, if rows scatter "
        "independently of each other.",
    )
    add_filters(parser)
    parser.add_argument("--metric", default="time_ms", metavar="NAME", help=f"one of: {', '.join(METRICS)} (time_ms)")
    parser.add_argument(
        "--threshold", type=share, default=0.02, metavar="SHARE", help="smallest change that counts (0.02)"
    )
    parser.add_argument("--format", default="text", choices=FORMATS, help="(text)")
    parser.add_argument("--all", action="store_true", help="the levels of every cell, not only of cells that changed")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write there, not to the screen")
    return parser
