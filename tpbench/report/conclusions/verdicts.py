"""Verdicts: the fastest correct variant of each problem, and how far the row can be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tpbench.report.conclusions.mixing import PROVENANCE, differing_provenance
from tpbench.report.grids.grid import GridRow, RecordGrid
from tpbench.report.grids.records import BELOW_FLOOR, HOST_BOUND, THROTTLED, Record, is_measurement, remark_marks
from tpbench.report.numbers.clocks import CLOCKS, WALL, Clock
from tpbench.report.numbers.interleaved import interleaved_ratio
from tpbench.report.numbers.ratio import Ratio, ratio

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
class Timed:
    """A measured cell of a problem: its column in the grid, and its record."""

    column: str
    record: Record


@dataclass(frozen=True)
class Verdict:
    """The answer for one problem."""

    grid: RecordGrid
    row: GridRow
    clock: Clock
    """The clock that decides: that of the device if all measured cells have its time, else the wall clock."""
    order: tuple[Timed, ...]
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
    def fastest(self) -> Timed | None:
        """The fastest cell."""
        return self.order[0] if self.order else None

    @property
    def time_ms(self) -> float:
        """The time of the fastest cell by the deciding clock."""
        return float(self.order[0].record[self.clock.time_column])

    @property
    def runner_up(self) -> Timed | None:
        """The fastest cell of another variant. Without one, the fastest with other options of the same variant."""
        return _runner_up(self.order)

    @property
    def ranks(self) -> int:
        """The number of ranks of the problem."""
        records = [record for record in self.row.records if record]
        return max((int(each["tp_size"] or 1) * int(each["dp_size"] or 1) for each in records), default=1)


def verdicts(grid: RecordGrid, disputed: frozenset[str] = frozenset()) -> list[Verdict]:
    """Return the verdict of each problem of a grid. `disputed`: ids of the rows of which a warning speaks."""
    problems = grid.problems
    return [_verdict(problems, row, disputed) for row in problems.rows]


def _verdict(grid: RecordGrid, row: GridRow, disputed: frozenset[str]) -> Verdict:
    cells = [
        Timed(column, record)
        for column, record in zip(grid.columns, row.records, strict=True)
        if record and is_measurement(record) and record["time_ms"] is not None
    ]
    clock = next(
        (clock for clock in CLOCKS if cells and all(each.record[clock.time_column] is not None for each in cells)), WALL
    )
    order = tuple(sorted(cells, key=lambda each: float(each.record[clock.time_column])))
    by_wall = min(order, key=lambda each: float(each.record["time_ms"]), default=None)
    second = _runner_up(order)
    compared = _ratio(second.record, order[0].record, clock) if second else None
    wall_fastest = by_wall.column if by_wall else ""
    return Verdict(
        grid, row, clock, order, compared, wall_fastest, _doubts(order, compared, wall_fastest, disputed)
    )  # fmt: skip


def _runner_up(order: Sequence[Timed]) -> Timed | None:
    others = [each for each in order if each.record["variant"] != order[0].record["variant"]]
    return next(iter([*others, *order[1:]]), None)


def _ratio(above: Record, below: Record, clock: Clock) -> Ratio:
    """Return the ratio of two cells: by their rounds, by their samples, or of their medians without an interval."""
    by_rounds = interleaved_ratio(above, below, clock.time_column)
    by_samples = by_rounds or ratio(above[clock.samples_column], below[clock.samples_column])
    return by_samples or Ratio(float(above[clock.time_column]) / float(below[clock.time_column]))


def _doubts(
    order: Sequence[Timed], compared: Ratio | None, wall_fastest: str, disputed: frozenset[str]
) -> tuple[str, ...]:
    if not order:
        return ("unmeasured",)
    first = [each for each in (order[0], _runner_up(order)) if each]
    holds = {
        "tie": compared is not None and compared.low is not None and compared.low <= 1,
        "alone": compared is None,
        "few samples": compared is not None and compared.low is None,
        "wall differs": wall_fastest != order[0].column,
        "losses differ": any(str(each.record["row_id"]) in disputed for each in first),
        "mixed": bool(differing_provenance(each.record for each in first)),
        "host-bound": any(HOST_BOUND in remark_marks(each.record) for each in first),
        "throttled": any(THROTTLED in remark_marks(each.record) for each in first),
        "below floor": any(BELOW_FLOOR in remark_marks(each.record) for each in first),
        "shared host": any(each.record["beside"] for each in first),
    }
    return tuple(name for name in DOUBTS if holds.get(name))


def selected(all_verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return the verdicts to show first: all if they are few, else the slowest problem of each grid and rank count.

    A problem with a runner-up goes before one that a single variant ran.
    """
    if len(all_verdicts) <= SELECTED:
        return list(all_verdicts)
    chosen: dict[tuple[int, int], Verdict] = {}
    for each in all_verdicts:
        key = (id(each.grid), each.ranks)
        if each.order and (key not in chosen or _weight(each) > _weight(chosen[key])):
            chosen[key] = each
    return [each for each in all_verdicts if any(each is other for other in chosen.values())]


def _weight(verdict: Verdict) -> tuple[bool, float]:
    return (verdict.runner_up is not None, verdict.time_ms)


def verdict_columns() -> tuple[str, ...]:
    """Return the columns that records need for a verdict, besides times."""
    columns = [column for clock in CLOCKS for column in (clock.time_column, clock.samples_column)]
    return (*PROVENANCE, "beside", "fraction_of_floor", "peak_gib", *columns)
