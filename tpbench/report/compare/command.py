"""`scripts/report.py compare BEFORE AFTER`: a table for people, and an exit code for continuous integration."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tpbench.report.compare import render
from tpbench.report.compare.changes import CLOCKS, INCOMPARABLE, compare_cells
from tpbench.report.compare.pairs import ACROSS, pair_cells
from tpbench.report.rows import read_rows
from tpbench.settings import JobError, unknown

FORMATS = {
    "text": render.text,
    "markdown": render.markdown,
    "csv": render.comma_separated,
    "html": render.page,
}


def main(arguments: Sequence[str]) -> int:
    """Run the command. The exit code is 1 if a cell got slower by more than the threshold or fails now."""
    asked = _parser().parse_args(arguments)
    try:
        allowed = asked.across.split(",") if asked.across else []
        for name in allowed:
            if name not in ACROSS:
                raise JobError(unknown("column to compare across", name, ACROSS))
        pairs = pair_cells(read_rows([asked.before]), read_rows([asked.after]))
        changes = compare_cells(pairs, asked.metric, asked.threshold, allowed)
        content = FORMATS[asked.format](changes, asked.metric, asked.threshold)
        if asked.output is None:
            sys.stdout.write(content)
            sys.stdout.flush()
        else:
            asked.output.write_text(content, encoding="utf-8")
    except (JobError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    incomparable = sum(change.verdict == INCOMPARABLE for change in changes)
    if incomparable:
        print(f"report: warning: {incomparable} of {len(changes)} cells could not be compared", file=sys.stderr)
    if incomparable == len(changes):
        return 2  # a check that compared nothing must not pass
    return int(any(change.fails() for change in changes))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="report.py compare",
        description="Cell by cell: is AFTER slower than BEFORE? Exit code 1 when something got slower by more than the "
        "threshold or does not work any more, 2 when nothing can be compared.",
    )
    parser.add_argument("before", help="folder, file or glob of rows")
    parser.add_argument("after", help="folder, file or glob of rows")
    parser.add_argument(
        "--threshold", type=_share, default=0.03, metavar="SHARE", help="smallest change that counts (0.03)"
    )
    parser.add_argument("--metric", default="time_ms", choices=CLOCKS, help="wall or device time (time_ms)")
    parser.add_argument(
        "--across", metavar="A,B", help="compare although these differ, say driver_version,torch_version"
    )
    parser.add_argument("--format", default="text", choices=FORMATS, help="(text)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write there instead of to the screen")
    return parser


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be a share from 0 to 1, say 0.03")
    return value
