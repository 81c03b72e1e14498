"""Tables of the HTML report: verdicts, machines, failures, and those of each section. Templates escape their texts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from tpbench.report.analysis.grid import RecordGrid, RecordGrids
from tpbench.report.analysis.metrics import (
    Metric,
    number,
    ratio_text,
)
from tpbench.report.analysis.records import (
    Record,
    column_label,
    problem_identity,
    value_text,
)
from tpbench.report.analysis.verdicts import GOOD, ProblemVerdict
from tpbench.report.pivot import FAILED, failures, legend, metric_table
from tpbench.suggestions import printable
from tpbench.tables import MISSING, Table, TableCell
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


def _quantity(value: float | None, unit: str = "", kind: str = "") -> TableCell:
    """Return a number with its unit."""
    return TableCell(MISSING) if value is None else TableCell(f"{number(value)} {unit}".rstrip(), float(value), kind)


def verdict_table(verdicts: Sequence[ProblemVerdict]) -> Table:
    """Return a line for each problem of a grid, the slowest first."""
    rows = [_verdict_cells(verdict) for verdict in sorted(verdicts, key=lambda verdict: -verdict.time_ms)]
    return Table("verdicts", VERDICT_COLUMNS, rows)


def _verdict_cells(verdict: ProblemVerdict) -> list[TableCell]:
    trust = TableCell(", ".join(verdict.doubts) or GOOD)
    fastest, second = verdict.fastest, verdict.runner_up
    if fastest is None:
        return [TableCell(verdict.problem), *[TableCell(MISSING)] * 3, trust, *[TableCell(MISSING)] * 3]
    record = fastest.record
    behind, won = TableCell(MISSING), "best" if verdict.ratio and verdict.ratio.decided else ""
    if second and verdict.ratio:
        low, high = verdict.ratio.low, verdict.ratio.high
        interval = "" if low is None or high is None else f"{ratio_text(low)} to {ratio_text(high)}"
        behind = TableCell(f"{ratio_text(verdict.ratio.value)} {second.column}", verdict.ratio.value, detail=interval)
    share, memory = record["fraction_of_floor"], _quantity(record["peak_gib"], "GiB")
    if isinstance(memory.value, float) and memory.value < NO_MEMORY_GIB:
        memory = replace(memory, text=f"<{number(NO_MEMORY_GIB)} GiB")
    return [
        TableCell(verdict.problem),
        TableCell(fastest.column),
        _quantity(verdict.time_ms, "ms" if verdict.clock == "device_ms" else "ms wall", won),
        behind,
        trust,
        TableCell(MISSING) if share is None else TableCell(f"{100 * share:.0f}%", float(share)),
        memory,
        _quantity(record["time_ms"], "ms"),
    ]


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
    hardware = "/".join(dict.fromkeys(value_text(name) for name in names if name))
    hosts = sorted({value_text(record["host"]) for record in records if record["host"]})
    where = f"{'host' if len(hosts) == 1 else 'hosts'} {', '.join(hosts)}" if hosts else ""
    return "; ".join(filter(None, [hardware or "unknown hardware", where])) + "."


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
    _, fastest, time, behind, *_ = _verdict_cells(verdict)
    return TableCell(f"{fastest.text} {time.text}", verdict.time_ms, "first", detail=behind.text)


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
