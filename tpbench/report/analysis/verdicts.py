"""What the rows of a grid say together: the fastest variant of each problem, doubts about it, and warnings."""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from tpbench.measure.clocks import DECIDING, WALL, Clock
from tpbench.report.analysis.comparison import Ratio, compare, value_of
from tpbench.report.analysis.grid import Key, RecordGrid
from tpbench.report.analysis.metrics import counted, metric, number, ratio_text
from tpbench.report.analysis.records import (
    BELOW_FLOOR,
    Record,
    is_measurement,
    json_object,
    named,
    problem_identity,
    remark_marks,
    value_text,
)
from tpbench.suggestions import printable
from tpbench.workloads import Workload
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
PROVENANCE = {"host": "hosts", "git_commit": "commits", "kernels_version": "kernel versions"}
"""Columns in which rows of a table should agree, with the plural of their meaning."""
MEASURED_WITH = ("time_budget_s", "min_iterations", "max_iterations", "precision")
"""Settings of the measurement. They split no problem."""


@dataclass(frozen=True)
class ProblemVerdict:
    """The answer for one problem."""

    grid: RecordGrid
    problem: str
    """The keys that tell the problems of the grid apart."""
    clock: Clock
    """The clock that decides: that of the device if all measured cells have it, else the wall clock."""
    fastest: Record | None
    """The fastest of the cells with inputs that change, or of those without, whichever are more."""
    runner_up: Record | None
    """The fastest cell of another variant. Without one, the fastest with other options of the same variant."""
    ratio: Ratio | None
    """Time of the runner-up over that of the fastest."""
    smallest: Record | None
    """The cell with the least memory. None if no row has any."""
    doubts: tuple[str, ...]
    """Names of `DOUBTS`."""

    @property
    def time_ms(self) -> float:
        """The time of the fastest cell by the deciding clock, or 0 if no cell was measured."""
        return float(self.fastest[self.clock.column]) if self.fastest else 0.0


def verdicts_of(grid: RecordGrid, disputed: Collection[str] = ()) -> list[ProblemVerdict]:
    """Return the verdict of each problem of a grid. `disputed`: ids of the rows of which a warning speaks."""
    return [_verdict(grid, key, disputed) for key in grid.lines]


def _verdict(grid: RecordGrid, key: Key, disputed: Collection[str]) -> ProblemVerdict:
    line = [record for record in grid.lines[key] if record]
    records = [record for record in line if is_measurement(record) and record["time_ms"] is not None]
    problem = grid.problem_text(key, grid.varying)
    if not records:
        return ProblemVerdict(grid, problem, WALL, None, None, None, None, ("unmeasured",))
    clock = next(clock for clock in DECIDING if all(record[clock.column] is not None for record in records))
    fresh = 2 * sum(bool(record["fresh"]) for record in records) > len(records)
    alike = [record for record in records if bool(record["fresh"]) == fresh]
    first, *others = sorted(alike, key=lambda record: float(record[clock.column]))
    second = next((record for record in others if record["variant"] != first["variant"]), others[0] if others else None)
    ratio = compare([first], [second], metric(clock.column)) if second else None
    by_wall = min([first, *others], key=lambda record: float(record["time_ms"]))
    slower = compare([by_wall], [first], metric("time_ms"))
    sized = [record for record in alike if value_of(record, metric("peak_gib"))]
    smallest = min(sized, key=lambda record: float(record["peak_gib"]), default=None)
    both = [record for record in (first, second) if record]
    holds = {
        "undecided": ratio is not None and not ratio.decided,
        "alone": ratio is None,
        "wall differs": by_wall["variant"] != first["variant"] and slower is not None and slower.decided,
        "losses differ": any(str(record["row_id"]) in disputed for record in both),
        "below floor": any(BELOW_FLOOR in remark_marks(record) for record in both),
        "shared host": any(record["beside"] for record in both),
    }
    doubts = tuple(name for name in holds if holds[name])
    return ProblemVerdict(grid, problem, clock, first, second, ratio, smallest, doubts)


def answers(all_verdicts: Sequence[ProblemVerdict]) -> list[str]:
    """Return a sentence for each machine. Machines are judged apart: the order on a CPU says nothing about GPUs."""
    by_machine: dict[str, list[ProblemVerdict]] = defaultdict(list)
    for verdict in all_verdicts:
        by_machine[str(verdict.grid.facts["hardware"])].append(verdict)
    if len(by_machine) == 1:
        return [answer(all_verdicts)]
    return [f"{machine}: {answer(of_machine)}" for machine, of_machine in by_machine.items()]


def answer(all_verdicts: Sequence[ProblemVerdict]) -> str:
    """Return the fastest variant, its share of the floor, and the ratio to the next variant, as sentences.

    A variant wins a problem only if the interval of the ratio to the next one excludes a tie. The floor is called the
    hardware limit there, because the sentences are read first. Problems with a single measured cell count only if no
    problem has two.
    """
    compared = [verdict for verdict in all_verdicts if verdict.runner_up]
    measured = [verdict for verdict in compared or all_verdicts if verdict.fastest]
    if not measured:
        return "No row is both correct and a measurement."
    by_variant: dict[str, list[ProblemVerdict]] = defaultdict(list)
    for verdict in measured:
        if verdict.fastest and (not compared or (verdict.ratio and verdict.ratio.decided)):
            by_variant[value_text(verdict.fastest["variant"])].append(verdict)
    if not by_variant:
        return f"Undecided in {counted(len(measured), 'problem')}: two runs may differ as much by chance."
    winner, *others = sorted(by_variant, key=lambda name: -len(by_variant[name]))
    won, undecided = by_variant[winner], len(measured) - sum(map(len, by_variant.values()))
    elsewhere = [f"{name} in {len(by_variant[name])}" for name in others]
    elsewhere += [f"undecided in {undecided}"] if undecided else []
    kind = "compared problems" if compared else "problems"
    where = "" if len(measured) == 1 else f" in {f'{len(won)} of' if elsewhere else 'all'} {len(measured)} {kind}"
    text = f"{'Fastest' if compared else 'Measured alone'}: {winner}{where}"
    text += f" ({', '.join(elsewhere)})" if elsewhere else ""
    shares = [verdict.fastest["fraction_of_floor"] for verdict in won if verdict.fastest]
    if shares := [share for share in shares if share is not None]:
        text += f", at {100 * median(shares):.0f}% of the hardware limit"
    ratios = [verdict.ratio.value for verdict in won if verdict.ratio]
    if ratios:
        names = {value_text(verdict.runner_up["variant"]) for verdict in won if verdict.runner_up}
        next_name = names.pop() if len(names) == 1 else "The next variant"
        text += f". {next_name} takes {ratio_text(median(ratios)).rstrip('x')} times as long"
    middle = "medians, " if len(won) > 1 and (shares or ratios) else ""
    clocks = " or ".join(sorted({verdict.clock.name for verdict in won}))
    return f"{text} ({middle}{clocks} time).{_least_memory(compared)}"


def _least_memory(verdicts: Sequence[ProblemVerdict]) -> str:
    """Return a sentence on the variant that most often needs the least memory, or nothing without rows."""
    pairs = [(verdict.smallest, verdict.fastest) for verdict in verdicts if verdict.smallest and verdict.fastest]
    if not pairs:
        return ""
    name, count = Counter(value_text(smallest["variant"]) for smallest, _ in pairs).most_common(1)[0]
    where = "" if count == len(pairs) else f" in {count} of {len(pairs)}"
    shares = [smallest["peak_gib"] / fastest["peak_gib"] for smallest, fastest in pairs if fastest["peak_gib"]]
    beside = f", with {median(shares):.0%} of the fastest variant's" if shares and median(shares) < 0.95 else ""
    return f" Least memory: {name}{where}{beside}."


def disagreements(rows: Iterable[Record]) -> dict[str, frozenset[str]]:
    """Return a sentence for each problem whose correct rows differ by more than their dtype allows, with their ids.

    The sentence names the problem, the two rows that are farthest apart, and what to do. It is safe to print.
    """
    problems: dict[tuple[object, ...], list[Record]] = defaultdict(list)
    for row in rows:
        workload = workload_of(row)
        if row["status"] == "ok" and row["loss_value"] is not None and workload:
            problems[(workload.name, *((name, row[name]) for name in problem_identity(workload)))].append(row)
    sentences = {}
    for equal_rows in problems.values():
        workload = workload_of(equal_rows[0])
        assert workload
        tolerance = workload.pivot.loss_tolerance.get(equal_rows[0]["dtype"], 1e-4)
        if difference := _far_apart(equal_rows, tolerance):
            problem = name_of_problem(equal_rows[0], workload)
            advice = "Measure both again, and use neither until they agree"
            sentence = printable(f"equal problems show different losses ({problem}): {difference}. {advice}", 600)
            sentences[sentence] = frozenset(str(row["row_id"]) for row in equal_rows)
    return sentences


def _far_apart(rows: Sequence[Record], tolerance: float) -> str:
    """Name the rows with the lowest and the highest loss if these differ by more than the tolerance."""
    ordered = sorted(rows, key=lambda row: (math.isnan(row["loss_value"]), row["loss_value"]))
    one, other = ordered[0], ordered[-1]
    low, high = one["loss_value"], other["loss_value"]
    if math.isnan(low) or abs(low - high) <= tolerance * max(1.0, abs(low), abs(high)):
        return ""
    named, other_named = (
        f"{value_text(row.get('label'))} (dp{value_text(row['dp_size'])} x tp{value_text(row['tp_size'])})"
        for row in (one, other)
    )
    return f"{named} {number(low)} and {other_named} {number(high)}; a share of {tolerance:g} is allowed"


def name_of_problem(row: Record, workload: Workload) -> str:
    """Name a problem by the fields that are not implied and not the default, and by its tokens."""
    shown = {
        name: row[name]
        for name, default in problem_identity(workload).items()
        if row[name] is not None and name not in workload.pivot.implied
        if row[name] != default or name in workload.pivot.rows
    }
    shown.setdefault("tokens", row["tokens"])
    fields = [named(name, value) for name, value in shown.items() if value is not None]
    return printable(" ".join([workload.name, *fields]), 300)


def mixing_note(grid: RecordGrid) -> str:
    """Return sentences about the hosts, versions, settings and inputs that a grid's rows mix, or an empty text."""
    records, kinds = grid.records, []
    for name, plural in PROVENANCE.items():
        if len(values := sorted({value_text(record[name]) for record in records if record[name]})) > 1:
            kinds.append(f"{len(values)} {plural}" + (f" ({', '.join(values)})" if name == "host" else ""))
    jobs = [json_object(record["job"]) for record in records]
    for name in MEASURED_WITH:
        if len(values := sorted({str(job[name]) for job in jobs if name in job})) > 1:
            kinds.append(f"{name} {printable(', '.join(values), 60)}")
    sentences = [f"This table mixes {', '.join(kinds)}"] if kinds else []
    if any(len({bool(record["fresh"]) for record in line if record}) > 1 for line in grid.lines.values()):
        sentences.append("Rows with fresh=true have inputs that change, and are compared only with each other")
    return ". ".join(sentences)
