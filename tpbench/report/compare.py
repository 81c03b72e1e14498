"""`tpbench compare BEFORE AFTER`: a table for people, and an exit code for continuous integration."""

import argparse
import glob
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from tpbench.report import command_line
from tpbench.report.analysis import changes
from tpbench.report.analysis.changes import CellChange, CellPair, Comparison
from tpbench.report.analysis.comparison import Ratio
from tpbench.report.analysis.conditions import ACROSS
from tpbench.report.analysis.metrics import counted, metric
from tpbench.report.analysis.power import CommonFactor, Test
from tpbench.settings import JobError, user_path
from tpbench.suggestions import printable, unknown
from tpbench.tables import MISSING, Document, Table, TableCell, number_cell

BLIND = 3
"""Exit code of a comparison in which nothing got worse, but which could not have seen it."""
MORE_ROWS = (2, 3, 4, 6, 8)
"""Rows on each side for which `--simulate` says what they would show."""


def main(arguments: Sequence[str]) -> int:
    """Run the command. The exit code is 1 if a cell got worse by more than the threshold, fails now or is missing.

    It is 1, too, if all cells together got worse, and `BLIND` if nothing did but the comparison could not have seen it.
    Raises JobError for a wrong request, and if nothing was compared, because a check of nothing must not pass.
    """
    options = _parser().parse_args(arguments)
    form = command_line.output_format(options, tuple(command_line.TABLES))
    allowed = options.across.split(",") if options.across is not None else []
    for name in allowed:
        if name not in ACROSS:
            raise JobError(unknown("column to compare across", name, ACROSS))
    before, after, remark = read_sides(options.before, options.after, options.rows)
    shown = metric(options.metric or command_line.default_time(pd.concat([before, after])))
    pairs = changes.pair_cells(before, after)
    if not any(pair.before and pair.after for pair in pairs):
        one, other = (next(pair.name for pair in pairs if getattr(pair, side)) for side in ("before", "after"))
        only = f"{one} is only before, {other} only after"
        raise JobError(f"nothing can be compared, because no cell is on both sides: {only}")
    for side, frame in ((options.before, before), (options.after, after)):
        command_line.require_values(frame, shown.name, side)
    if remark:
        print(f"report: {remark}", file=sys.stderr)
    comparison = changes.compare_cells(pairs, shown, options.threshold, allowed)
    comparison = changes.with_common_factors(comparison, pairs)
    if options.simulate is not None:
        command_line.write(power_document(comparison, options.simulate), form, options.output)
        return 0
    command_line.write(comparison_document(comparison), form, options.output)
    others = [change for change in comparison.changes if change.verdict == changes.INCOMPARABLE]
    for reason, count in Counter("; ".join(change.notes) for change in others).most_common(1):
        which = f"{len(others)} of {len(comparison.changes)} cells could not be compared; {count} of them: {reason}"
        print(f"report: warning: {which}", file=sys.stderr)
    if not any(change.is_decided for change in comparison.changes):
        raise JobError("nothing was compared, so this is no pass")
    # A side that is a part of the other may have fewer cells.
    lost = [] if options.allow_missing or remark else lost_cells(pairs)
    if lost:
        missing = f"{counted(len(lost), 'cell')} measured before and missing after, so this is no pass"
        print(f"report: {missing}: {printable(', '.join(lost))} (--allow-missing accepts that)", file=sys.stderr)
    return 1 if lost or comparison.fails else BLIND if comparison.is_blind else 0


def comparison_document(comparison: Comparison) -> Document:
    """Return a table with a line for each cell: failures first, then by the ratio, the worst first.

    A note that all compared cells have stands below the table, once. CSV has it in each line.
    """
    shown, worse = comparison.metric, comparison.metric.better or -1
    noted = [change.notes for change in comparison.changes if change.ratio]
    shared = [note for note in noted[0] if all(note in notes for notes in noted)] if len(noted) > 1 else []
    ordered = sorted(
        comparison.changes,
        key=lambda change: (not change.fails, not change.ratio, worse * (change.ratio.value if change.ratio else 0)),
    )
    columns = (
        "cell", "verdict", "ratio", "low", "high", "sees", f"before {shown.name}", f"after {shown.name}", "p",
        "rows before", "rows after", "note",
    )  # fmt: skip
    rows = [*map(_common_cells, [comparison] * len(comparison.common), comparison.common)]
    rows += [_cells(change, comparison, shared) for change in ordered]
    notes = [f"All compared cells: {printable('; '.join(shared))}."] if shared else []
    return Document([Table("", columns, rows)], _summary(comparison), [*notes, *comparison.method()])


def _cells(change: CellChange, comparison: Comparison, shared: Sequence[str]) -> list[TableCell | str]:
    kind = "bad" if change.fails else "best" if change.verdict in (changes.FASTER, changes.BETTER) else ""
    ratio, write = change.ratio, comparison.metric.write
    notes = [note for note in change.notes if note not in shared or not ratio]
    bounds = (ratio.value, ratio.low, ratio.high) if ratio else (None, None, None)
    return [
        printable(change.name),
        TableCell(change.verdict, kind=kind),
        *(number_cell(value, "{:.3f}".format) for value in bounds),
        number_cell(comparison.smallest_seen(change), _change_text),
        *(number_cell(value, write) for value in (change.before, change.after)),
        number_cell(change.p, "{:.2g}".format),
        *(TableCell(str(count), count) for count in change.rows),
        TableCell(printable("; ".join(notes)), printable("; ".join(change.notes))),
    ]


def _common_cells(comparison: Comparison, common: CommonFactor) -> list[TableCell | str]:
    """Return the line of a common factor."""
    ratio, verdict = common.ratio, comparison.verdict_on(common)
    is_bad = verdict in (changes.SLOWER, changes.WORSE) and common is comparison.common[0]
    return [
        printable(common.name),
        TableCell(verdict, kind="bad" if is_bad else ""),
        *(number_cell(value, "{:.3f}".format) for value in (ratio.value, ratio.low, ratio.high)),
        *[TableCell(MISSING)] * 3,
        number_cell(ratio.p, "{:.2g}".format),
        *[TableCell(MISSING)] * 2,
        f"the ratio is above 1 in {common.above} of {counted(common.cells, 'cell')}",
    ]


def _change_text(change: float) -> str:
    return f"{change:.1%}" if change < 10 else ">1000%"


def power_document(comparison: Comparison, change: float) -> Document:
    """Return how likely these rows show that a cell takes longer by a share, and how likely more rows would."""
    cells = comparison.tested
    if not cells:
        raise JobError("no cell was tested, so nothing is known about its scatter")
    tests: list[tuple[str, tuple[int | None, int | None], Test, Ratio]] = [
        (common.name, (None, None), comparison.common_test, common.ratio) for common in comparison.common[:1]
    ]
    tests += [(cell.name, cell.rows, comparison.test, cell.ratio) for cell in cells if cell.ratio]
    rows: list[list[TableCell | str]] = [
        [
            printable(name),
            *(number_cell(count, "{:.0f}".format) for count in counts),
            number_cell(test.smallest(ratio), _change_text),
            number_cell(test.chance(ratio, change), "{:.0%}".format),
        ]
        for name, counts, test, ratio in tests
    ]
    more = ", ".join(f"{comparison.chance(change, count):.0%} with {count}" for count in MORE_ROWS)
    sentence = (
        f"These rows find a change of {100 * change:.3g}% in {comparison.metric.name} in "
        f"{comparison.chance(change):.0%} of the cells that have one. With rows of several sweeps a side, measured in "
        f"turns: {more}"
    )
    notes = ["found: the probability that a change of the cell, or one that all cells have in common, is found."]
    return Document([Table("", ("cell", "rows before", "rows after", "sees", "found"), rows)], sentence, notes)


def _summary(comparison: Comparison) -> str:
    compared, others = Counter[str](), Counter[str]()
    for change in comparison.changes:
        (compared if change.is_decided else others)[change.verdict] += 1
    words = [", ".join(f"{count} {verdict}" for verdict, count in kind.most_common()) for kind in (compared, others)]
    sentence = f"{counted(compared.total(), 'cell')} compared in {comparison.metric.name}{words[0] and f': {words[0]}'}"
    sentence += f"; not compared: {words[1]}" if others else ""
    if not comparison.is_blind:
        return sentence
    wanted, seen = changes.TO_SEE * comparison.threshold, comparison.seen
    return (
        f"This comparison could not have seen a change of {100 * wanted:.3g}% in {seen.count(False)} of "
        f"{counted(len(seen), 'cell')}: measure both sides several times, in turns (--simulate says how often). "
        f"{sentence}"
    )


def lost_cells(pairs: Sequence[CellPair]) -> list[str]:
    """Return the names of the cells that were measured before and have no row after.

    Cells of hardware that the second set has no row of do not count: its sweep ran elsewhere.
    """
    machines = {pair.after[-1]["hardware"] for pair in pairs if pair.after}
    gone = [(pair.name, pair.before[-1]) for pair in pairs if pair.before and not pair.after]
    return [name for name, row in gone if row["status"] == "ok" and row["hardware"] in machines]


def read_sides(before: str, after: str, places: Sequence[str]) -> tuple[pd.DataFrame, pd.DataFrame, str]:
    """Return the rows of both sides, and a remark if they share rows.

    A side is a folder, a file, a glob, or the id of a sweep whose rows are in `places`. Commas separate several. A row
    of both sides counts for the smaller side only, so `outputs` can be compared with one of its sweeps. Raises JobError
    for a side without rows, and for two sides with the same rows.
    """
    sides = {name: _rows(name, places) for name in (before, after)}
    names = {name: side["row_id"].astype(str) + " " + side["started_at"].astype(str) for name, side in sides.items()}
    shared = {*names[before]} & {*names[after]}
    if shared == {*names[before]} == {*names[after]}:
        raise JobError(
            f"{before} and {after} are the same {len(shared)} rows, so there is nothing to compare. Name two sweeps "
            f"of them instead: {_newest_sweeps(sides[after])}"
        )
    larger, smaller = (before, after) if len(sides[before]) >= len(sides[after]) else (after, before)
    sides[larger] = sides[larger][~names[larger].isin(shared)]
    remark = f"{len(shared)} rows of both sides count for {smaller} only" if shared else ""
    return sides[before], sides[after], remark


def _rows(side: str, places: Sequence[str]) -> pd.DataFrame:
    """Return the rows of one side: folders, files and globs, or sweeps of `places`."""
    whole = str(user_path(side, "a side"))
    names = [whole] if _is_place(whole) else [str(user_path(name, "a side")) for name in side.split(",") if name]
    if not names or any(map(_is_place, names)):
        return command_line.read_rows([command_line.rows_of(name) for name in names or [side]])
    places = [str(user_path(place, "--rows")) for place in places]
    where = ", ".join(places)
    try:
        frame = command_line.read_rows(places)
    except JobError:
        missing = f"no such folder or file: {', '.join(names)}"
        raise JobError(f"{missing}, and no sweeps in {where} (see --rows)") from None
    sweeps, chosen = frame["sweep_id"].astype(str), []
    for name in names:
        known = sweeps[frame["sweep_id"].notna()].unique()
        matches = [sweep for sweep in known if sweep == name]
        matches = matches or [sweep for sweep in known if sweep.startswith(name) or sweep.endswith(name)]
        if len(matches) != 1:
            problem = f"{len(matches)} sweeps of {where} match" if matches else "no such folder, file or sweep:"
            raise JobError(f"{problem} {name}. Newest sweeps in {where}: {_newest_sweeps(frame)}")
        chosen += matches
    return frame[sweeps.isin(chosen)]


def _is_place(name: str) -> bool:
    return Path(name).exists() or bool(glob.glob(name, recursive=True))  # noqa: PTH207  absolute patterns


def _newest_sweeps(frame: pd.DataFrame) -> str:
    sweeps = frame.groupby("sweep_id")["started_at"].agg(["min", "size"]).sort_values("min").tail(3)[::-1]
    return ", ".join(f"{name} ({counted(count, 'row')})" for name, count in sweeps["size"].items()) or "none"


def _parser() -> argparse.ArgumentParser:
    parser = command_line.ReportParser(
        "tpbench compare",
        description="Cell by cell: is AFTER worse than BEFORE? Exit code 1 if a cell got worse by more than the "
        "threshold, does not work any more or is missing in AFTER, or if all cells together got worse; 2 if nothing "
        f"could be compared; {BLIND} if nothing got worse, but a change of {changes.TO_SEE:.2g} thresholds could not "
        "have been seen.",
        epilog=f"{changes.FALSE_ALARMS}. Repeated rows of a cell refine this assumption: run both sweeps several "
        "times, in turns, and name all of them. A machine that is slower during one side than during the other cannot "
        "be told from slower code.",
    )
    add, side = parser.add_argument, "folder, file or glob of rows, or the id of a sweep; commas separate several"
    add("before", help=side)
    add("after", help="the same")
    add("--rows", nargs="+", default=["outputs"], metavar="PLACE", help="where the rows of sweeps are (outputs)")
    command_line.add_test(parser, 0.03)
    simulate = "in place of verdicts, say how surely these rows show a change of this size, say 5%%"
    add("--simulate", type=command_line.share, metavar="SHARE", help=simulate)
    add("--across", metavar="A,B", help="compare although these differ, say torch_version")
    add("--allow-missing", action="store_true", help="pass although AFTER lacks cells of BEFORE")
    command_line.add_output(parser, tuple(command_line.TABLES))
    return parser
