"""Tables of the HTML report: verdicts, machines, failures, and those of each section. Templates escape their texts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

import numpy as np

from tpbench.report.analysis.grid import RecordGrid, RecordGrids
from tpbench.report.analysis.metrics import (
    CLOCK_NAMES,
    CLOCKS,
    METRICS,
    Metric,
    counted,
    metric,
    number,
    ratio_text,
)
from tpbench.report.analysis.records import Record, column_label, mark_meanings, problem_identity, value_text
from tpbench.report.analysis.verdicts import GOOD, ProblemVerdict, group_names, mixing_note, selected, speedups
from tpbench.report.pivot import FAILED, failures, metric_table
from tpbench.report.repeat import row_command
from tpbench.report.studies import cell_table, value_cell
from tpbench.results.schema import workload_columns
from tpbench.settings import JobError
from tpbench.suggestions import printable
from tpbench.tables import MISSING, Table, TableCell
from tpbench.workloads import Study, workloads

NO_MEMORY_GIB = 0.001
"""Memory below this is shown as such: no digit of it matters."""
LONG = 8
"""Longest sequence, such as a number of each rank, that a cell of a table shows."""
MACHINE_FACTS = {
    "gpu_name": "GPU", "gpu_count": "GPUs of the node", "nodes": "nodes", "driver_version": "driver",
    "cuda_version": "CUDA", "nccl_version": "NCCL", "torch_version": "torch", "triton_version": "triton",
    "backend": "backend", "python_version": "Python", "os": "system", "cpu_model": "CPU", "cpu_count": "CPU cores",
    "tpbench_version": "tpbench", "kernels_version": "kernels", "git_commit": "commit",
    "git_dirty": "uncommitted changes", "host": "host",
}  # fmt: skip
"""Columns of rows that describe the machine and its software, with the names of the table's columns."""
_VERDICT_COLUMNS = (
    "problem", "fastest", "device time", "wall time", "runner-up", "of floor", "memory", "trust",
)  # fmt: skip
_MEASURES = (
    *METRICS, "time_ci_low_ms", "time_ci_high_ms", "device_ci_low_ms", "device_ci_high_ms", "row_id", "log_dir",
)  # fmt: skip


def _quantity(value: float | None, unit: str = "", kind: str = "") -> TableCell:
    """Return a number with its unit."""
    return TableCell(MISSING) if value is None else TableCell(f"{number(value)} {unit}".rstrip(), float(value), kind)


@dataclass(frozen=True)
class VerdictGroup:
    """The verdicts of one grid, and the anchor of its section."""

    heading: str
    anchor: str
    table: Table


def verdict_groups(verdicts: Sequence[ProblemVerdict]) -> list[VerdictGroup]:
    """Return a table of the selected verdicts of each grid, in the order of the grids."""
    grids = _grids(verdicts)
    shown = selected(verdicts)
    groups = []
    for at, (grid, name) in enumerate(zip(grids, group_names(grids), strict=True)):
        rows = [_verdict_cells(verdict) for verdict in shown if verdict.grid is grid]
        if rows:
            groups.append(VerdictGroup(name or grid.workload, f"s{at}", Table("verdicts", _VERDICT_COLUMNS, rows)))
    return groups


def every_verdict(verdicts: Sequence[ProblemVerdict]) -> Table | None:
    """Return one table of all verdicts, or None if `verdict_groups` has them all."""
    if len(selected(verdicts)) == len(verdicts):
        return None
    grids = _grids(verdicts)
    names = dict(zip(map(id, grids), group_names(grids), strict=True))
    rows = [[TableCell(names[id(verdict.grid)] or MISSING), *_verdict_cells(verdict)] for verdict in verdicts]
    return Table("verdicts of all problems", ("group", *_VERDICT_COLUMNS), rows, exact=False)


def _grids(verdicts: Sequence[ProblemVerdict]) -> list[RecordGrid]:
    return list({id(verdict.grid): verdict.grid for verdict in verdicts}.values())


def _verdict_cells(verdict: ProblemVerdict) -> list[TableCell]:
    """Return the cells of a verdict. The last one has the names of its doubts."""
    trust = TableCell(", ".join(verdict.doubts) or GOOD)
    fastest, second = verdict.fastest, verdict.runner_up
    if fastest is None:
        return [TableCell(verdict.problem), *[TableCell(MISSING)] * (len(_VERDICT_COLUMNS) - 2), trust]
    record = fastest.record
    behind = TableCell(MISSING)
    if second and verdict.ratio:
        behind = TableCell(f"{ratio_text(verdict.ratio.value)} {second.column}", verdict.ratio.value)
    share, memory = record["fraction_of_floor"], _quantity(record["peak_gib"], "GiB")
    if isinstance(memory.value, float) and memory.value < NO_MEMORY_GIB:
        memory = replace(memory, text=f"<{number(NO_MEMORY_GIB)} GiB")
    return [
        TableCell(verdict.problem),
        TableCell(fastest.column),
        _quantity(record["device_ms"], "ms", "best" if verdict.clock == "device_ms" else ""),
        _quantity(record["time_ms"], "ms", "best" if verdict.clock == "time_ms" else ""),
        behind,
        TableCell(MISSING) if share is None else TableCell(f"{100 * share:.0f}%", float(share)),
        memory,
        trust,
    ]


def machines(records: Iterable[Record]) -> Table:
    """Return a table of the distinct combinations, with the number of rows of each. What all rows share is a note."""
    combinations = Counter(tuple(_fact(name, record[name]) for name in MACHINE_FACTS) for record in records)
    distinct = [len({facts[at] for facts in combinations}) for at in range(len(MACHINE_FACTS))]
    labels = list(MACHINE_FACTS.values())
    varying = [at for at, count in enumerate(distinct) if count > 1]
    first = next(iter(combinations), ())
    shared = [f"{labels[at]} {first[at]}" for at, count in enumerate(distinct) if count == 1]
    rows = [[str(count), *(facts[at] for at in varying)] for facts, count in combinations.most_common()]
    notes = [f"In all rows: {', '.join(shared)}."] if shared else []
    return Table("what it ran on", ["rows", *(labels[at] for at in varying)], rows, notes=notes)


def _fact(name: str, value: object) -> str:
    """Return the value of a column as text. Eight digits identify a commit."""
    return value_text(str(value)[:8] if name == "git_commit" and value else value)


def period(first: datetime, last: datetime) -> str:
    """Return the days from the first to the last moment."""
    return " to ".join(dict.fromkeys(f"{moment:%Y-%m-%d}" for moment in (first, last)))


def machines_line(records: Sequence[Record], facts: str) -> str:
    """Return the hardware, the hosts and the facts that all rows share, as one sentence."""
    models: dict[str, None] = {}
    hosts: dict[str, int | None] = {}
    for record in records:
        on_gpu = record["device"] == "cuda"
        if name := record["gpu_name"] if on_gpu else record["cpu_model"]:
            models[value_text(name)] = None
        if record["host"]:
            hosts[value_text(record["host"])] = record["gpu_count"] if on_gpu else None
    named = [f"{host} ({counted(count, 'GPU')})" if count else host for host, count in sorted(hosts.items())]
    where = [f"{'host' if len(named) == 1 else 'hosts'} {', '.join(named)}"] if named else []
    return "; ".join(["/".join(models) or "unknown hardware", *where, *filter(None, [facts])]) + "."


def machines_side_by_side(verdicts: Sequence[ProblemVerdict]) -> Table | None:
    """Return the fastest variant of each problem on each machine, or None if no problem was measured on two."""
    problems: dict[tuple[tuple[str, str], ...], dict[str, ProblemVerdict]] = defaultdict(dict)
    for verdict in verdicts:
        if verdict.fastest:
            problem = _problem(verdict.grid.workload, verdict.fastest.record)
            problems[problem].setdefault(verdict.grid.facts["hardware"], verdict)
    problems = {problem: machines for problem, machines in problems.items() if len(machines) > 1}
    if not problems:
        return None
    hardware = list(dict.fromkeys(name for machines in problems.values() for name in machines))
    values: dict[str, set[str]] = defaultdict(set)
    for problem in problems:
        for name, value in problem:
            values[name].add(value)
    rows: list[list[TableCell | str]] = []
    for problem, machines in problems.items():
        varying = [f"{column_label(name)}={value}" for name, value in problem[1:] if len(values[name] - {MISSING}) > 1]
        rows.append([problem[0][1], " ".join(varying), *(_fastest(machines.get(name)) for name in hardware)])
    return Table("machines side by side", ["workload", "problem", *hardware], rows, keys=2)


def _problem(workload: str, record: Record) -> tuple[tuple[str, str], ...]:
    """Return the workload and the fields that identify the problem of a record, with their defaults."""
    known = workloads().get(workload)
    defaults = dict.fromkeys(("tokens", "tp_size", "dp_size", "nodes")) | (problem_identity(known) if known else {})
    fields = {name: default if record.get(name) is None else record[name] for name, default in defaults.items()}
    return (("workload", workload), *((name, value_text(value)) for name, value in fields.items()))


def _fastest(verdict: ProblemVerdict | None) -> TableCell:
    """Return the fastest variant with its time, and in a second line the runner-up with its ratio."""
    if verdict is None or verdict.fastest is None:
        return TableCell(MISSING)
    second = verdict.runner_up
    behind = f"{ratio_text(verdict.ratio.value)} {second.column}" if second and verdict.ratio else ""
    clock = "" if verdict.clock == "device_ms" else " wall"
    text = f"{verdict.fastest.column} {number(verdict.time_ms)} ms{clock}"
    return TableCell(text, verdict.time_ms, "first", detail=behind)


def failure_groups(arranged: RecordGrids) -> Table:
    """Return the failed cells of all grids, merged by status and reason."""
    rows: list[list[TableCell | str]] = [
        [str(len(cells)), TableCell(status, kind=FAILED.get(status, "")), reason or "no reason given",
         printable("; ".join(cells), 600)]
        for (status, reason), cells in failures(arranged).items()
    ]  # fmt: skip
    return Table("failures", ["cells", "status", "reason", "which"], rows)


def pivot_table(grid: RecordGrid, shown: Metric) -> Table:
    """Return problems by variants. Tables of times carry all digits of their numbers."""
    table = metric_table(grid, shown)
    marks = mark_meanings(" ".join(cell.text for row in table.cells for cell in row[table.keys :]))
    notes = [note for note in table.notes if note != mixing_note(grid)]  # the section says what rows mix
    return replace(table, notes=[*notes, *marks], exact=shown.name in ("time_ms", "device_ms"))


def metrics_with_values(grid: RecordGrid, names: Sequence[str]) -> list[Metric]:
    """Return the metrics for which some cell has a value."""
    return [metric(name) for name in names if any(cell.record.get(name) is not None for cell in grid.cells())]


def speedup_table(grid: RecordGrid) -> Table:
    """Return the speed-ups of the fastest column of each problem over each other column."""
    rows: list[list[TableCell | str]] = []
    for clock in CLOCKS:
        for speedup in speedups(grid, clock):
            low, high = speedup.ratio.low, speedup.ratio.high
            rows.append([
                speedup.problem, speedup.fastest.column, speedup.other.column, CLOCK_NAMES[clock],
                "interleaved" if speedup.ratio.interleaved else "one after the other",
                TableCell(f"{speedup.ratio.value:.3g}x", speedup.ratio.value),
                MISSING if low is None or high is None else f"{low:.3g}x to {high:.3g}x",
            ])  # fmt: skip
    columns = ["problem", "fastest", "over", "clock", "measured", "speed-up", "95% interval"]
    return Table("speed-ups", columns, rows)


def study_table(grid: RecordGrid, name: str, study: Study) -> Table:
    """Return the numbers of a study for every cell."""
    return _with_commands(replace(cell_table(grid, study), heading=f"study {name}"), grid)


def complete_table(grid: RecordGrid) -> Table:
    """Return all numbers of every cell, without sequences such as traces. What all rows share is in the notes."""
    records = [cell.record for cell in grid.cells()]
    of_workload = [name for name in workload_columns().get(grid.workload, {}) if name not in grid.key_names]
    shown, shared = [], []
    for name in dict.fromkeys((*_MEASURES, *of_workload)):
        values = [record.get(name) for record in records]
        is_long = any(isinstance(value, (list, np.ndarray)) and len(value) > LONG for value in values)
        if is_long:
            continue
        is_plain = isinstance(values[0], (str, int, float)) and all(value == values[0] for value in values)
        if name in of_workload and len(records) > 1 and is_plain:
            shared.append(f"{column_label(name)}={value_cell(name, records[0]).text}")
        else:
            shown.append(name)
    table = replace(cell_table(grid, Study("", tuple(shown))), heading="every cell", exact=True)
    notes = [f"The same in all rows: {', '.join(shared)}."] if shared else []
    return _with_commands(replace(table, notes=[*table.notes, *notes]), grid)


def _with_commands(table: Table, grid: RecordGrid) -> Table:
    """Add to each cell's row when it finished, and a button with the command that measures it again."""
    rows: list[list[TableCell | str]] = []
    for row, cell in zip(table.rows, grid.cells(), strict=True):
        finished = cell.record["finished_at"]
        try:
            button = TableCell("copy command", command=row_command(cell.record))
        except JobError:
            button = TableCell(MISSING)
        rows.append([*row, f"{finished:%Y-%m-%d %H:%M} UTC" if finished else MISSING, button])
    return replace(table, columns=[*table.columns, "finished at", "measure again"], rows=rows)
