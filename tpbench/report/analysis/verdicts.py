"""Verdicts: the fastest correct variant of each problem, how far the row can be trusted, and sentences about both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from tpbench.report.analysis.agreement import PROVENANCE, differing_provenance
from tpbench.report.analysis.grid import GridCell, GridRow, RecordGrid, heading
from tpbench.report.analysis.metrics import number
from tpbench.report.analysis.ratios import CLOCKS, WALL, ClockColumns, Ratio, ratio_of_records
from tpbench.report.analysis.records import (
    BELOW_FLOOR,
    HOST_BOUND,
    THROTTLED,
    is_measurement,
    remark_marks,
    value_text,
)

DOUBTS = {
    "tie": "the interval of the ratio to the runner-up contains 1",
    "alone": "no second variant was measured",
    "few samples": "too few samples for an interval",
    "wall differs": "by wall time another variant, or other options, are the fastest",
    "losses differ": "a warning names this problem",
    "mixed": "fastest and runner-up differ in host, commit or kernel version",
    "host-bound": "the device of the fastest or the runner-up is idle for more than a fifth of the wall time",
    "throttled": "a GPU of the fastest or the runner-up lowered its clocks while it measured",
    "below floor": "the fastest or the runner-up is more than 5% faster than its floor, so something is wrong",
    "shared host": "another job ran on the host at the same time",
    "unmeasured": "no row is both correct and a measurement",
}
"""Trust marks with their meanings. A problem without any of these doubts is marked as `GOOD`."""
GOOD = "good"
SELECTED = 20
"""Most problems of which a page shows every one at the top."""


@dataclass(frozen=True)
class ProblemVerdict:
    """The answer for one problem."""

    grid: RecordGrid
    row: GridRow
    clock: ClockColumns
    """The clock that decides: that of the device if all measured cells have its time, else the wall clock."""
    order: tuple[GridCell, ...]
    """Measured cells, the fastest first."""
    ratio: Ratio | None
    """Time of the runner-up over that of the fastest."""
    wall_fastest: str
    """Column of the fastest by wall time. Empty if no cell has a wall time."""
    doubts: tuple[str, ...]
    """Names of `DOUBTS`."""

    @property
    def problem(self) -> str:
        """The keys that tell the problems of the grid apart."""
        return self.grid.problem_text(self.row.key, self.grid.distinguishing_keys(self.grid.varying))

    @property
    def fastest(self) -> GridCell | None:
        """The fastest cell."""
        return self.order[0] if self.order else None

    @property
    def time_ms(self) -> float:
        """The time of the fastest cell by the deciding clock."""
        return float(self.order[0].record[self.clock.time_column])

    @property
    def runner_up(self) -> GridCell | None:
        """The fastest cell of another variant. Without one, the fastest with other options of the same variant."""
        return _runner_up(self.order)

    @property
    def ranks(self) -> int:
        """The number of ranks of the problem."""
        records = [record for record in self.row.records if record]
        return max((int(record["tp_size"] or 1) * int(record["dp_size"] or 1) for record in records), default=1)


def verdict_columns() -> tuple[str, ...]:
    """Return the columns that records need for a verdict, besides times."""
    columns = [column for clock in CLOCKS for column in (clock.time_column, clock.samples_column)]
    return (*PROVENANCE, "beside", "fraction_of_floor", "peak_gib", *columns)


def verdicts(grid: RecordGrid, disputed: frozenset[str] = frozenset()) -> list[ProblemVerdict]:
    """Return the verdict of each problem of a grid. `disputed`: ids of the rows of which a warning speaks."""
    problems = grid.problems
    return [_verdict(problems, row, disputed) for row in problems.rows]


def _verdict(grid: RecordGrid, row: GridRow, disputed: frozenset[str]) -> ProblemVerdict:
    cells = [cell for cell in grid.cells_of(row) if is_measurement(cell.record) and cell.record["time_ms"] is not None]
    leading = (clock for clock in CLOCKS if cells and all(cell.record[clock.time_column] is not None for cell in cells))
    clock = next(leading, WALL)
    order = tuple(sorted(cells, key=lambda cell: float(cell.record[clock.time_column])))
    by_wall = min(order, key=lambda cell: float(cell.record["time_ms"]), default=None)
    second = _runner_up(order)
    compared = ratio_of_records(second.record, order[0].record, clock)[0] if second else None
    wall_fastest = by_wall.column if by_wall else ""
    doubts = _doubts(order, compared, wall_fastest, disputed)
    return ProblemVerdict(grid, row, clock, order, compared, wall_fastest, doubts)


def _runner_up(order: Sequence[GridCell]) -> GridCell | None:
    others = [cell for cell in order if cell.record["variant"] != order[0].record["variant"]]
    return next(iter([*others, *order[1:]]), None)


def _doubts(
    order: Sequence[GridCell], compared: Ratio | None, wall_fastest: str, disputed: frozenset[str]
) -> tuple[str, ...]:
    if not order:
        return ("unmeasured",)
    records = [cell.record for cell in (order[0], _runner_up(order)) if cell]
    marks = "".join(map(remark_marks, records))
    holds = {
        "tie": compared is not None and compared.low is not None and compared.low <= 1,
        "alone": compared is None,
        "few samples": compared is not None and compared.low is None,
        "wall differs": wall_fastest != order[0].column,
        "losses differ": any(str(record["row_id"]) in disputed for record in records),
        "mixed": bool(differing_provenance(records)),
        "host-bound": HOST_BOUND in marks,
        "throttled": THROTTLED in marks,
        "below floor": BELOW_FLOOR in marks,
        "shared host": any(record["beside"] for record in records),
    }
    return tuple(name for name in DOUBTS if holds.get(name))


def selected(all_verdicts: Sequence[ProblemVerdict]) -> list[ProblemVerdict]:
    """Return the verdicts to show first: all if they are few, else the slowest problem of each grid and rank count.

    A problem with a runner-up goes before one that a single variant ran.
    """
    if len(all_verdicts) <= SELECTED:
        return list(all_verdicts)
    chosen: dict[tuple[int, int], ProblemVerdict] = {}
    for verdict in all_verdicts:
        key = (id(verdict.grid), verdict.ranks)
        if verdict.order and (key not in chosen or _weight(verdict) > _weight(chosen[key])):
            chosen[key] = verdict
    return [verdict for verdict in all_verdicts if any(verdict is other for other in chosen.values())]


def _weight(verdict: ProblemVerdict) -> tuple[bool, float]:
    return (verdict.runner_up is not None, verdict.time_ms)


def answer(all_verdicts: Sequence[ProblemVerdict]) -> str:
    """Return the fastest variant, its share of the floor, and the ratio to the next variant, as sentences.

    The floor is called the hardware limit there, because the sentences are read first.
    Problems with a single measured cell count only if no problem has two. Variants that ran only in Triton's
    interpreter are named, because a reader would miss them.
    """
    compared = [verdict for verdict in all_verdicts if verdict.runner_up]
    decided = [(verdict, verdict.fastest) for verdict in compared or all_verdicts]
    won = Counter(fastest.variant for _, fastest in decided if fastest)
    if not won:
        return f"No row is both correct and a measurement.{_interpreted(all_verdicts)}"
    (winner, count), *others = won.most_common()
    of_winner = [(verdict, fastest) for verdict, fastest in decided if fastest and fastest.variant == winner]
    total = sum(won.values())
    kind = "compared problems" if compared else "problems"
    where = "" if total == 1 else f" in {'all' if count == total else f'{count} of'} {total} {kind}"
    rest = [f"{name} in {number_of}" for name, number_of in others[:3]]
    if more := sum(number_of for _, number_of in others[3:]):
        rest.append(f"others in {more}")
    elsewhere = f" ({', '.join(rest)})" if rest else ""
    sentences = [f"{'Fastest' if compared else 'Measured alone'}: {winner}{where}{elsewhere}"]
    floors = [fastest.record["fraction_of_floor"] for _, fastest in of_winner]
    if shares := [share for share in floors if share is not None]:
        sentences[0] += f", at {100 * median(shares):.0f}% of the hardware limit"
    behind = [
        (other, float(other.record[verdict.clock.time_column]) / verdict.time_ms)
        for verdict, _ in of_winner
        if (other := verdict.runner_up)
    ]
    if behind:
        names = {other.variant for other, _ in behind}
        next_name = names.pop() if len(names) == 1 else "The next variant"
        sentences.append(f"{next_name} takes {_times(median(factor for _, factor in behind))} as long")
    middle = "medians, " if count > 1 and (shares or behind) else ""
    clocks = " or ".join(sorted({verdict.clock.name for verdict, _ in of_winner}))
    return f"{'. '.join(sentences)} ({middle}{clocks} time).{_interpreted(all_verdicts)}"


def _interpreted(all_verdicts: Sequence[ProblemVerdict]) -> str:
    """Return a sentence about the correct variants that only Triton's interpreter ran, or nothing."""
    records = [record for verdict in all_verdicts for record in verdict.row.records if record]
    interpreted, measured = (
        {value_text(record["variant"]): None for record in records if record["status"] == "ok" and is_kind(record)}
        for is_kind in (lambda record: record["interpreted"], lambda record: not record["interpreted"])
    )
    names = [name for name in interpreted if name not in measured]
    return f" Only Triton's interpreter ran {', '.join(names)}, so there is no time to compare." if names else ""


def _times(factor: float) -> str:
    return f"{factor:.2f} times" if factor < 1.1 else f"{factor:.1f} times" if factor < 10 else f"{factor:.0f} times"


def disagreement(all_verdicts: Sequence[ProblemVerdict]) -> str:
    """Return a sentence about the problems in which wall time and device time name different winners, or nothing."""
    differing = [verdict for verdict in all_verdicts if "wall differs" in verdict.doubts]
    if not differing:
        return ""
    slowest = max(differing, key=lambda verdict: verdict.time_ms)
    grids = list({id(verdict.grid): verdict.grid for verdict in all_verdicts}.values())
    group = group_names(grids)[grids.index(slowest.grid)]
    by_device = slowest.order[0]
    by_wall = next(cell for cell in slowest.order if cell.column == slowest.wall_fastest)
    return (
        "By wall time another variant or other options are the fastest "
        f"in {len(differing)} of {len(all_verdicts)} problems. The slowest of them is "
        f"{group}{', ' if group else ''}{slowest.problem}: by device "
        f"time {by_device.column} ({number(slowest.time_ms)} ms, wall {number(by_device.record['time_ms'])} ms), "
        f"by wall time {by_wall.column} ({number(by_wall.record['time_ms'])} ms, "
        f"device {number(by_wall.record[slowest.clock.time_column])} ms)."
    )


def group_names(grids: Sequence[RecordGrid]) -> list[str]:
    """Return for each grid the facts that not all grids share, as one line."""
    shared = shared_facts(grids)
    return [heading({name: text for name, text in grid.facts.items() if name not in shared}) for grid in grids]


def shared_facts(grids: Sequence[RecordGrid]) -> dict[str, str]:
    """Return the facts that all grids have in common."""
    if not grids:
        return {}
    return {name: text for name, text in grids[0].facts.items() if all(grid.facts.get(name) == text for grid in grids)}
