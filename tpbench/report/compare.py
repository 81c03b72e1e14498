"""`tpbench compare BEFORE AFTER`: a table for people, and an exit code for continuous integration."""

import glob
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import pandas as pd

from tpbench.report import command_line
from tpbench.report.analysis import changes
from tpbench.report.analysis.changes import CellChange, Comparison
from tpbench.report.analysis.comparison import value_of
from tpbench.report.analysis.pairs import ACROSS, pair_cells
from tpbench.settings import JobError, user_path
from tpbench.suggestions import counted, number, printable, unknown
from tpbench.tables import Document, Table, TableCell, number_cell

BLIND = 3
"""Exit code of a comparison in which nothing got worse, but which could not have seen it."""
MORE_ROWS = (2, 3, 4, 6, 8)
"""Rows on each side for which `--simulate` says what they would show."""


def main(arguments: Sequence[str]) -> int:
    """Run the command. Raises JobError if nothing was compared: a check of nothing must not pass."""
    options = _parser().parse(arguments)
    allowed = options.across.split(",") if options.across is not None else []
    for name in allowed:
        if name not in ACROSS:
            raise JobError(unknown("column to compare across", name, ACROSS))
    before, after, remark = read_sides(options.before, options.after)
    pairs = pair_cells(before, after)
    if not any(old and new for _, old, new in pairs):
        one, other = (next(pair[0] for pair in pairs if pair[side]) for side in (1, 2))
        only = f"{one} is only before, {other} only after"
        raise JobError(f"nothing can be compared, because no cell is on both sides: {only}")
    shown = command_line.tested_metric(options, {options.before: before, options.after: after})
    comparison = changes.compare_cells(pairs, shown, options.threshold, allowed)
    command_line.write(comparison_document(comparison, options.simulate), options)
    # Cells of hardware without rows after don't count as missing, nor those of a side that is a part of the other.
    machines = {new[-1]["hardware"] for _, _, new in pairs if new}
    gone = [(name, old[-1]) for name, old, new in pairs if not (new or options.allow_missing or remark)]
    lost = [name for name, row in gone if row["status"] == "ok" and row["hardware"] in machines]
    others = [change for change in comparison.changes if change.verdict == changes.INCOMPARABLE]
    # With a ratio, the first note is the reason, and the others are only remarks.
    reasons = ["; ".join(change.notes[:1] if change.ratio else change.notes) for change in others]
    for reason, count in Counter(reasons).most_common(1):
        which = f"{len(others)} of {len(comparison.changes)} cells could not be compared; {count} of them: {reason}"
        print(f"tpbench: warning: {which}", file=sys.stderr)
    if remark:
        print(f"tpbench: {remark}", file=sys.stderr)
    if not any(change.is_decided for change in comparison.changes):
        raise JobError("nothing was compared, so this is no pass")
    if lost:
        missing = f"{counted(len(lost), 'cell')} measured before and missing after, so this is no pass"
        print(f"tpbench: {missing}: {printable(', '.join(lost))} (--allow-missing accepts that)", file=sys.stderr)
    worse = any(change.fails for change in (*comparison.common[:1], *comparison.changes))
    return 1 if lost or worse else BLIND if comparison.blind else 0


def comparison_document(comparison: Comparison, simulated: float | None = None) -> Document:
    """Return a table with a line for each cell: failures first, then the worst ratio. `simulated`: see `--simulate`."""
    shown, worse = comparison.metric, comparison.metric.better or -1
    noted = [change.notes for change in comparison.changes if change.ratio]
    shared = [note for note in noted[0] if all(note in notes for notes in noted)] if len(noted) > 1 else []

    def cells(change: CellChange) -> dict[str, TableCell | str]:
        kind = "bad" if change.fails else "best" if change.verdict in (changes.FASTER, changes.BETTER) else ""
        notes = [note for note in change.notes if note not in shared or not change.ratio]
        value, low, high, *_ = change.ratio or (None, None, None)
        line: dict[str, TableCell | str] = {
            "cell": printable(change.name),
            "verdict": TableCell(change.verdict, kind=kind),
            **{name: number_cell(x, number) for name, x in (("ratio", value), ("low", low), ("high", high))},
            "sees": number_cell(comparison.smallest_seen(change), lambda x: f"{x:.1%}" if x < 10 else ">1000%"),
        }
        if simulated is not None:
            line["found"] = number_cell(comparison.chance(change, simulated), "{:.0%}".format)
        sides = {"before": change.before, "after": change.after}
        for side, rows in sides.items():
            line[f"{side} {shown.name}"] = number_cell(changes.level(rows, shown), shown.write)
        line["p"] = number_cell(change.p, "{:.2g}".format)
        for side, rows in sides.items():
            count = sum(value_of(row, shown) is not None for row in rows) if change.ratio else 0
            line[f"rows {side}"] = TableCell(str(count), count)
        return line | {"note": TableCell(printable("; ".join(notes)), printable("; ".join(change.notes)))}

    ordered = sorted(
        comparison.changes,
        key=lambda change: (not change.fails, not change.ratio, worse * (change.ratio.value if change.ratio else 0)),
    )
    lines = [cells(change) for change in (*comparison.common, *ordered)]
    notes = [f"All compared cells: {printable('; '.join(shared))}."] if shared else []
    if simulated is not None and comparison.tested:
        chances = (
            f"{fmean(comparison.chance(change, simulated, count) or 0.0 for change in comparison.tested):.0%}"
            f"{f' with {count}' if count else ''}"
            for count in (None, *MORE_ROWS)
        )
        notes.append(
            f"found: how surely a change of {100 * simulated:.3g}% of the cell, or of all cells, is found. Of a cell, "
            f"on average: {', '.join(chances)} rows on each side, measured in turns."
        )
    table = Table("", [*lines[0]], [[*line.values()] for line in lines])
    return Document([table], _summary(comparison), [*notes, *comparison.method()])


def _summary(comparison: Comparison) -> str:
    verdicts = Counter(change.verdict for change in comparison.changes)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
    sentence = f"{counted(verdicts.total(), 'cell')} by {comparison.metric.name}: {counts}"
    if not comparison.blind:
        return sentence
    seen = counted(sum(change.ratio is not None for change in comparison.changes), "cell")
    return (
        f"This comparison could not have seen a change of {100 * changes.TO_SEE * comparison.threshold:.3g}% in "
        f"{len(comparison.blind)} of {seen}: measure both sides several times, in turns (--simulate says how often). "
        f"{sentence}"
    )


def read_sides(before: str, after: str) -> tuple[pd.DataFrame, pd.DataFrame, str]:
    """Return the rows of both sides, and a remark if they share rows, which then count for the smaller side only."""
    sides = {name: _rows(name) for name in (before, after)}
    ids = {name: side["row_id"].astype(str) + " " + side["started_at"].astype(str) for name, side in sides.items()}
    shared = {*ids[before]} & {*ids[after]}
    if shared == {*ids[before]} == {*ids[after]}:
        raise JobError(
            f"{before} and {after} are the same {len(shared)} rows, so there is nothing to compare. "
            "`tpbench rows PLACE --only sweep_id=ID --into FOLDER` copies the rows of one sweep"
        )
    smaller, larger = sorted((after, before), key=lambda name: len(sides[name]))
    sides[larger] = sides[larger][~ids[larger].isin(shared)]
    remark = f"{len(shared)} rows of both sides count for {smaller} only" if shared else ""
    return sides[before], sides[after], remark


def _rows(side: str) -> pd.DataFrame:
    path = str(user_path(side, "a side"))
    is_one = Path(path).exists() or glob.glob(path, recursive=True)  # noqa: PTH207  absolute patterns
    return command_line.read_rows([command_line.rows_of(name) for name in ([side] if is_one else side.split(","))])


def _parser() -> command_line.ReportParser:
    parser = command_line.ReportParser(
        "compare",
        tuple(command_line.TABLES),
        description="Cell by cell: is AFTER worse than BEFORE? Exit code 1 if a cell, or all cells together, got worse "
        "by more than the threshold, does not work any more or is missing; 2 if nothing could be compared; "
        f"{BLIND} if nothing got worse, but a change of {changes.TO_SEE:.2g} thresholds could not have been seen.",
        epilog=f"{changes.FALSE_ALARMS}. To see more, run both sweeps several times, in turns, and name all of them.",
    )
    add, side = parser.add_argument, "folder, file or glob of rows; commas separate several"
    add("before", help=side)
    add("after", help="the same")
    parser.add_test(0.03)
    simulate = "also say how surely such rows show a change of this size, say 5%%"
    add("--simulate", type=command_line.share, metavar="SHARE", help=simulate)
    add("--across", metavar="A,B", help="compare although these differ, say torch_version")
    add("--allow-missing", action="store_true", help="pass although AFTER lacks cells of BEFORE")
    return parser
