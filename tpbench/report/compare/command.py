"""`scripts/report.py compare BEFORE AFTER`: a table for people, and an exit code for continuous integration."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tpbench.report.analysis.metrics import METRICS, counted, metric
from tpbench.report.command_line import ReportParser, print_or_write, require_values
from tpbench.report.compare import render
from tpbench.report.compare.changes import INCOMPARABLE, Comparison, compare_cells
from tpbench.report.compare.conditions import ACROSS
from tpbench.report.compare.method import ASSUMPTION, FALSE_ALARMS
from tpbench.report.compare.pairs import lost_cells, pair_cells
from tpbench.report.compare.sides import read_sides
from tpbench.report.compare.unpaired import explain_unpaired
from tpbench.settings import JobError
from tpbench.suggestions import unknown

FORMATS = {
    "text": render.text,
    "markdown": render.markdown,
    "csv": render.comma_separated,
    "html": render.page,
}
_SHOWN_LOST = 4


def main(arguments: Sequence[str]) -> int:
    """Run the command. The exit code is 1 if a cell got worse by more than the threshold, fails now or is missing.

    It is 2 if nothing was compared, because a check that compared nothing must not pass.
    """
    options = _parser().parse_args(arguments)
    try:
        comparison, lost = _compare(options)
        content = FORMATS[options.format](comparison)
        print_or_write(content, options.output)
    except (JobError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    changes = comparison.changes
    incomparable = Counter(each.note for each in changes if each.verdict == INCOMPARABLE)
    if incomparable:
        reason, count = incomparable.most_common(1)[0]
        print(
            f"report: warning: {incomparable.total()} of {len(changes)} cells could not be compared; {count} of them: "
            f"{reason}",
            file=sys.stderr,
        )
    if not comparison.decided:
        print("report: nothing was compared, so this is no pass", file=sys.stderr)
        return 2
    if lost:
        print(
            f"report: {counted(len(lost), 'cell')} measured before and missing after, so this is no pass: "
            f"{', '.join(lost[:_SHOWN_LOST])}{', ...' * (len(lost) > _SHOWN_LOST)} (--allow-missing accepts that)",
            file=sys.stderr,
        )
    return int(bool(lost) or any(change.fails() for change in changes))


def _compare(options: argparse.Namespace) -> tuple[Comparison, list[str]]:
    """Return the comparison, and the names of cells that AFTER must have and has not.

    If the sides share rows, one is a part of the other, which may have more cells. Raises JobError for a wrong request,
    and if no cell is on both sides.
    """
    shown = metric(options.metric)
    allowed = options.across.split(",") if options.across else []
    for name in allowed:
        if name not in ACROSS:
            raise JobError(unknown("column to compare across", name, ACROSS))
    before, after, remarks = read_sides(options.before, options.after, options.rows)
    pairs = pair_cells(before, after)
    if not any(pair.before and pair.after for pair in pairs):
        raise JobError(explain_unpaired(pairs))
    for side, frame in ((options.before, before), (options.after, after)):
        require_values(frame, shown, side)
    for remark in remarks:
        print(f"report: {remark}", file=sys.stderr)
    lost = [] if options.allow_missing or remarks else lost_cells(pairs)
    return compare_cells(pairs, options.metric, options.threshold, allowed), lost


def _parser() -> argparse.ArgumentParser:
    parser = ReportParser(
        "compare",
        description="Cell by cell: is AFTER worse than BEFORE? Exit code 1 if a cell got worse by more than the "
        "threshold, does not work any more or is missing in AFTER, 2 if nothing could be compared.",
        epilog=f"{FALSE_ALARMS}. {ASSUMPTION}. Repeated rows of a cell replace this assumption step by step: run both "
        "sweeps several times, in turns, and name all of them. A machine that is slower during one side than during "
        "the other cannot be told from slower code.",
    )
    side = "folder, file or glob of rows, or the id of a sweep; commas separate several"
    parser.add_argument("before", help=side)
    parser.add_argument("after", help="the same")
    parser.add_argument(
        "--rows", nargs="+", default=["outputs"], metavar="PLACE", help="where the rows of sweeps are (outputs)"
    )
    parser.add_argument(
        "--threshold", type=share, default=0.03, metavar="SHARE", help="smallest change that counts (0.03)"
    )
    parser.add_argument(
        "--metric", default="time_ms", metavar="NAME", help=f"any metric of a report: {', '.join(METRICS)} (time_ms)"
    )
    parser.add_argument(
        "--across", metavar="A,B", help="compare although these differ, say driver_version,torch_version"
    )
    parser.add_argument(
        "--allow-missing", action="store_true", help="pass although cells of BEFORE have no row in AFTER"
    )
    parser.add_argument("--format", default="text", choices=FORMATS, help="(text)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write there instead of to the screen")
    return parser


def share(text: str) -> float:
    """Return a share given on a command line, from 0 to 1."""
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be a share from 0 to 1, say 0.03")
    return value
