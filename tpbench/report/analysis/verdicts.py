"""What the rows of a grid say together: the fastest variant of each problem, doubts about it, and the least memory."""

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from statistics import median
from typing import NamedTuple

from tpbench.measure.clocks import DECIDING, WALL, Clock
from tpbench.report.analysis import row_values
from tpbench.report.analysis.comparison import Ratio, compare
from tpbench.report.analysis.grid import Key, RecordGrid
from tpbench.report.analysis.row_values import Record, is_measurement, metric
from tpbench.suggestions import counted, ratio_text
from tpbench.tables import value_text

DOUBTS = {
    "undecided": "two runs scatter as much as the fastest and the runner-up differ, or samples are too few to tell",
    "alone": "no second variant was measured",
    "wall differs": "by wall time another variant is the fastest",
    "losses differ": "a warning names this problem",
    "below floor": "the fastest or the runner-up is more than 5% faster than its floor, so something is wrong",
    "shared host": "another job ran on the host at the same time",
    "unmeasured": "no row is both correct and a measurement",
}
"""Trust marks with their meanings. A problem without any of these doubts is marked as `GOOD`."""
GOOD = "good"


class ProblemVerdict(NamedTuple):
    """The answer for one problem."""

    hardware: str
    problem: str
    """The keys that tell the problems of the grid apart."""
    doubts: tuple[str, ...]
    """Names of `DOUBTS`."""
    clock: Clock = WALL
    """The clock that decides: that of the device if all measured cells have it, else the wall clock."""
    fastest: Record | None = None
    """The fastest of the cells with inputs that change, or of those without, whichever are more."""
    runner_up: Record | None = None
    """The fastest cell of another variant. Without one, the fastest with other options of the same variant."""
    ratio: Ratio | None = None
    """Time of the runner-up over that of the fastest."""
    smallest: Record | None = None
    """The cell with the least memory. None if no row has any."""
    time_ms: float = 0.0
    """The time of the fastest cell by the deciding clock."""

    @property
    def winner(self) -> str | None:
        """The variant that is surely faster than the others, or the only one, or None."""
        decided = self.fastest and (self.ratio is None or self.ratio.decided)
        return value_text(self.fastest["variant"]) if self.fastest and decided else None


def verdict_of(grid: RecordGrid, key: Key, disputed: Collection[str] = ()) -> ProblemVerdict:
    """Return the verdict of a problem of a grid. `disputed`: ids of the rows of which a warning speaks."""
    place = str(grid.facts["hardware"]), grid.problem_text(key, grid.varying)
    measured = [row for row in grid.lines[key] if row and is_measurement(row) and row["time_ms"] is not None]
    if not measured:
        return ProblemVerdict(*place, ("unmeasured",))
    clock = next(clock for clock in DECIDING if all(record[clock.column] is not None for record in measured))
    fresh = 2 * sum(bool(record["fresh"]) for record in measured) > len(measured)
    alike = [record for record in measured if bool(record["fresh"]) == fresh]
    first, *others = sorted(alike, key=lambda record: float(record[clock.column]))
    second = next((record for record in others if record["variant"] != first["variant"]), others[0] if others else None)
    ratio = compare([first], [second], metric(clock.column)) if second else None
    by_wall = min([first, *others], key=lambda record: float(record["time_ms"]))
    slower = compare([by_wall], [first], metric("time_ms"))
    both = [record for record in (first, second) if record]
    holds = {
        "undecided": ratio is not None and not ratio.decided,
        "alone": ratio is None,
        "wall differs": by_wall["variant"] != first["variant"] and slower is not None and slower.decided,
        "losses differ": any(str(record["row_id"]) in disputed for record in both),
        "below floor": any(row_values.BELOW_FLOOR in row_values.remark_marks(record) for record in both),
        "shared host": any(record["beside"] for record in both),
    }
    smallest = min((row for row in alike if row["peak_gib"]), key=lambda row: float(row["peak_gib"]), default=None)
    doubts = tuple(filter(holds.get, holds))
    return ProblemVerdict(*place, doubts, clock, first, second, ratio, smallest, float(first[clock.column]))


def answers(all_verdicts: Sequence[ProblemVerdict]) -> list[str]:
    """Return a sentence for each machine. Machines are judged apart: the order on a CPU says nothing about GPUs."""
    machines: dict[str, list[ProblemVerdict]] = defaultdict(list)
    for verdict in all_verdicts:
        machines[verdict.hardware].append(verdict)
    return [f"{name}: " * (len(machines) > 1) + answer(of_machine) for name, of_machine in machines.items()]


def answer(all_verdicts: Sequence[ProblemVerdict]) -> str:
    """Return which variant is surely the fastest and by how much, and which needs the least memory, as text."""
    compared = [verdict for verdict in all_verdicts if verdict.runner_up]
    measured = compared or [verdict for verdict in all_verdicts if verdict.fastest]
    if not measured:
        return "No row is both correct and a measurement."
    counts = Counter(verdict.winner for verdict in measured).most_common()
    names = [f"{name or 'undecided'}{f' {count}' if count < len(measured) else ''}" for name, count in counts]
    text = f"{'Fastest' if compared else 'Measured alone'} in {counted(len(measured), 'problem')}: {', '.join(names)}."
    best = next((name for name, _ in counts if name), None)
    won = [verdict for verdict in measured if best and verdict.winner == best]
    shares = [share for verdict in won if verdict.fastest and (share := verdict.fastest["fraction_of_floor"])]
    ratios = [verdict.ratio.value for verdict in won if verdict.ratio]
    parts = [f"reaches {median(shares):.0%} of the hardware limit"] if shares else []
    parts += [f"is {ratio_text(median(ratios)).rstrip('x')} times as fast as the next"] if ratios else []
    if parts:
        clocks = " or ".join(sorted({verdict.clock.name for verdict in won}))
        text += f" {best} {' and '.join(parts)} ({'medians, ' * (len(won) > 1)}{clocks} time)."
    if pairs := [(verdict.smallest, verdict.fastest) for verdict in compared if verdict.smallest and verdict.fastest]:
        name, count = Counter(value_text(smallest["variant"]) for smallest, _ in pairs).most_common(1)[0]
        where = "" if count == len(pairs) else f" in {count} of {len(pairs)}"
        sizes = [smallest["peak_gib"] / fastest["peak_gib"] for smallest, fastest in pairs if fastest["peak_gib"]]
        beside = f", with {median(sizes):.0%} of the fastest variant's" if sizes and median(sizes) < 0.95 else ""
        text += f" Least memory: {name}{where}{beside}."
    return text
