"""Tables of the HTML report: verdicts, machines, failures, and those of each section. Templates escape their texts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from tpbench.report.analysis.grid import RecordGrid, RecordGrids
from tpbench.report.analysis.metrics import Metric, number, ratio_text
from tpbench.report.analysis.records import Record, column_label, problem_identity, value_text, values_or
from tpbench.report.analysis.verdicts import GOOD, ProblemVerdict
from tpbench.report.pivot import FAILED, failures, legend, metric_table
from tpbench.suggestions import printable
from tpbench.tables import MISSING, Table, TableCell, number_cell
from tpbench.workloads import workloads

NO_MEMORY_GIB = 0.001
"""Memory below this is shown as such: no digit of it matters."""
MACHINE_FACTS = {
    "gpu_name": "GPU", "gpu_count": "GPUs of the node", "nodes": "nodes", "driver_version": "driver",
    "cuda_version": "CUDA", "nccl_version": "NCCL", "torch_version": "torch", "triton_version": "triton",
    "backend": "backend", "python_version": "Python", "os": "system", "cpu_model": "CPU", "cpu_count": "CPU cores",
    "tpbench_version": "tpbench", "kernels_version": "kernels", "git_commit": "commit",
    "git_dirty": "uncommitted changes", "host": "host",
}  # fmt: skip
"""Columns of rows that describe the machine and its software, with the names of the table's columns."""
VERDICT_COLUMNS = ("problem", "fastest", "time", "runner-up", "trust", "of floor", "memory", "wall time")


def verdict_table(verdicts: Sequence[ProblemVerdict]) -> Table:
    """Return a line for each problem of a grid, the slowest first."""
    rows = [_verdict_cells(verdict) for verdict in sorted(verdicts, key=lambda verdict: -verdict.time_ms)]
    return Table("verdicts", VERDICT_COLUMNS, rows)


def _verdict_cells(verdict: ProblemVerdict) -> list[TableCell]:
    trust, missing = TableCell(", ".join(verdict.doubts) or GOOD), TableCell(MISSING)
    fastest, second = verdict.fastest, verdict.runner_up
    if fastest is None:
        return [TableCell(verdict.problem), *[missing] * 3, trust, *[missing] * 3]
    record = fastest.record
    behind, won = missing, "best" if verdict.ratio and verdict.ratio.decided else ""
    if second and verdict.ratio:
        low, high = verdict.ratio.low, verdict.ratio.high
        interval = "" if low is None or high is None else f"{ratio_text(low)} to {ratio_text(high)}"
        behind = TableCell(f"{ratio_text(verdict.ratio.value)} {second.column}", verdict.ratio.value, detail=interval)
    memory = _quantity(record["peak_gib"], "GiB")
    if isinstance(memory.value, float) and memory.value < NO_MEMORY_GIB:
        memory = replace(memory, text=f"<{number(NO_MEMORY_GIB)} GiB")
    return [
        TableCell(verdict.problem),
        TableCell(fastest.column),
        replace(_quantity(verdict.time_ms, "ms" if verdict.clock == "device_ms" else "ms wall"), kind=won),
        behind,
        trust,
        number_cell(record["fraction_of_floor"], "{:.0%}".format),
        memory,
        _quantity(record["time_ms"], "ms"),
    ]


def _quantity(value: float | None, unit: str) -> TableCell:
    return number_cell(value, lambda value: f"{number(value)} {unit}")


def machines(records: Iterable[Record]) -> Table:
    """Return the facts about machines and software, each with its values, the most frequent first.

    A fact with several values has the number of rows behind each.
    """
    found: dict[str, Counter[str]] = {name: Counter() for name in MACHINE_FACTS}
    for record in records:
        for name, counts in found.items():
            if (value := record[name]) is not None:
                counts[value_text(str(value)[:8] if name == "git_commit" else value)] += 1
    rows = [
        [
            MACHINE_FACTS[name],
            ", ".join(f"{text} ({count})" if len(counts) > 1 else text for text, count in counts.most_common()),
        ]
        for name, counts in found.items()
        if counts
    ]
    return Table("what it ran on", ("fact", "values (rows)"), rows)


def machines_line(records: Sequence[Record]) -> str:
    """Return the hardware and the hosts as one sentence."""
    names = (record["gpu_name"] if record["device"] == "cuda" else record["cpu_model"] for record in records)
    hardware = "/".join(dict.fromkeys(value_text(name) for name in names if name)) or "unknown hardware"
    hosts = sorted({value_text(record["host"]) for record in records if record["host"]})
    where = f"; {'host' if len(hosts) == 1 else 'hosts'} {', '.join(hosts)}" if hosts else ""
    return f"{hardware}{where}."


def machines_side_by_side(verdicts: Sequence[ProblemVerdict]) -> Table | None:
    """Return the fastest variant of each problem on each machine, or None if no problem was measured on two.

    Each cell has the fastest variant with its time, and in a second line the runner-up with its ratio.
    """
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
    for name, value in (field for problem in problems for field in problem):
        values[name].add(value)
    rows: list[list[TableCell | str]] = []
    for ((_, workload), *fields), machines in problems.items():
        varying = [f"{column_label(name)}={value}" for name, value in fields if len(values[name] - {MISSING}) > 1]
        cells = [TableCell(MISSING)] * len(hardware)
        for name, verdict in machines.items():
            _, fastest, time, behind, *_ = _verdict_cells(verdict)
            text = f"{fastest.text} {time.text}"
            cells[hardware.index(name)] = TableCell(text, verdict.time_ms, "first", detail=behind.text)
        rows.append([workload, " ".join(varying), *cells])
    return Table("machines side by side", ["workload", "problem", *hardware], rows, keys=2)


def _problem(workload: str, record: Record) -> tuple[tuple[str, str], ...]:
    """Return the workload and the fields that identify the problem of a record, with their defaults."""
    known = workloads().get(workload)
    defaults = dict.fromkeys(("tokens", "tp_size", "dp_size", "nodes")) | (problem_identity(known) if known else {})
    fields = values_or(record, defaults).items()
    return (("workload", workload), *((name, value_text(value)) for name, value in fields))


def failure_groups(arranged: RecordGrids) -> Table:
    """Return the failed cells of all grids, merged by status and reason."""
    rows: list[list[TableCell | str]] = [
        [str(len(cells)), TableCell(status, kind=FAILED.get(status, "")), reason or "no reason given",
         printable("; ".join(cells), 600)]
        for (status, reason), cells in failures(arranged).items()
    ]  # fmt: skip
    return Table("failures", ["cells", "status", "reason", "which"], rows)


def pivot_table(grid: RecordGrid, shown: Metric) -> Table:
    """Return problems by variants, with the meanings of their marks."""
    table = metric_table(grid, shown)
    return replace(table, notes=[*table.notes, *legend([table], shown)])
