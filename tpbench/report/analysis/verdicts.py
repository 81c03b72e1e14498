"""What the rows of a grid say together: the fastest variant of each problem, doubts about it, and warnings."""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from statistics import median
from typing import NamedTuple

from tpbench.measure.clocks import DECIDING, WALL, Clock
from tpbench.report.analysis import records
from tpbench.report.analysis.comparison import Ratio, compare, value_of
from tpbench.report.analysis.grid import Key, RecordGrid
from tpbench.report.analysis.metrics import counted, metric, number, ratio_text
from tpbench.report.analysis.records import Record, named, value_text
from tpbench.suggestions import printable
from tpbench.workloads.definition import workload_of

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

    @property
    def time_ms(self) -> float:
        """The time of the fastest cell by the deciding clock, or 0 if no cell was measured."""
        return float(self.fastest[self.clock.column]) if self.fastest else 0.0

    @property
    def winner(self) -> str | None:
        """The variant that is surely faster than the others, or the only one, or None."""
        decided = self.fastest and (self.ratio is None or self.ratio.decided)
        return value_text(self.fastest["variant"]) if self.fastest and decided else None


def verdicts_of(grid: RecordGrid, disputed: Collection[str] = ()) -> list[ProblemVerdict]:
    """Return the verdict of each problem of a grid. `disputed`: ids of the rows of which a warning speaks."""
    return [_verdict(grid, key, disputed) for key in grid.lines]


def _verdict(grid: RecordGrid, key: Key, disputed: Collection[str]) -> ProblemVerdict:
    place = str(grid.facts["hardware"]), grid.problem_text(key, grid.varying)
    line = [record for record in grid.lines[key] if record]
    measured = [record for record in line if records.is_measurement(record) and record["time_ms"] is not None]
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
    sized = [record for record in alike if value_of(record, metric("peak_gib"))]
    both = [record for record in (first, second) if record]
    holds = {
        "undecided": ratio is not None and not ratio.decided,
        "alone": ratio is None,
        "wall differs": by_wall["variant"] != first["variant"] and slower is not None and slower.decided,
        "losses differ": any(str(record["row_id"]) in disputed for record in both),
        "below floor": any(records.BELOW_FLOOR in records.remark_marks(record) for record in both),
        "shared host": any(record["beside"] for record in both),
    }
    smallest = min(sized, key=lambda record: float(record["peak_gib"]), default=None)
    return ProblemVerdict(*place, tuple(filter(holds.get, holds)), clock, first, second, ratio, smallest)


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
    shares = [verdict.fastest["fraction_of_floor"] for verdict in won if verdict.fastest]
    known, ratios = [share for share in shares if share], [verdict.ratio.value for verdict in won if verdict.ratio]
    parts = [f"reaches {median(known):.0%} of the hardware limit"] if known else []
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


def disagreements(rows: Iterable[Record]) -> dict[str, frozenset[str]]:
    """Return a printable sentence for each problem whose correct rows have too different losses, with the rows' ids."""
    problems: dict[Key, list[Record]] = defaultdict(list)
    for row in rows:
        workload = workload_of(row)
        if row["status"] == "ok" and row["loss_value"] is not None and workload:
            problems[workload.name, *((name, row[name]) for name in records.problem_identity(workload))].append(row)
    sentences = {}
    for (_, *fields), equal_rows in problems.items():
        ordered = sorted(equal_rows, key=lambda row: (math.isnan(row["loss_value"]), row["loss_value"]))
        one, other = ordered[0], ordered[-1]
        low, high = one["loss_value"], other["loss_value"]
        workload = workload_of(one)
        assert workload
        tolerance = workload.pivot.loss_tolerance.get(one["dtype"], 1e-4)
        if math.isnan(low) or abs(low - high) <= tolerance * max(1.0, abs(low), abs(high)):
            continue
        defaults, problem = records.problem_identity(workload), workload.name
        for name, value in fields:
            is_told = name in workload.pivot.rows or value != defaults[name]
            if is_told and value is not None and name not in workload.pivot.implied:
                problem += f" {named(name, value)}"
        first, last = (
            f"{value_text(row['label'])} (dp{value_text(row['dp_size'])} x tp{value_text(row['tp_size'])}) "
            f"{number(row['loss_value'])}"
            for row in (one, other)
        )
        sentence = (
            f"equal problems show different losses ({problem}): {first} and {last}; a share of "
            f"{tolerance:g} is allowed. Measure both again, and use neither until they agree"
        )
        sentences[printable(sentence, 600)] = frozenset(str(row["row_id"]) for row in equal_rows)
    return sentences


def mixing_note(grid: RecordGrid) -> str:
    """Return sentences about the hosts, versions and inputs that a grid's rows mix, or an empty text."""
    kinds = []
    for name, plural in (("host", "hosts"), ("git_commit", "commits"), ("kernels_version", "kernel versions")):
        if len(values := sorted({value_text(record[name]) for record in grid.records if record[name]})) > 1:
            kinds.append(f"{len(values)} {plural}" + (f" ({', '.join(values)})" if name == "host" else ""))
    sentences = [f"This table mixes {', '.join(kinds)}"] if kinds else []
    if any(len({bool(record["fresh"]) for record in line if record}) > 1 for line in grid.lines.values()):
        sentences.append("Rows with fresh=true have inputs that change, and are compared only with each other")
    return ". ".join(sentences)
