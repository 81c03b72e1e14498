"""Machines and software versions on which the rows were measured, and the fastest variants of several machines."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from tpbench.report.conclusions.verdicts import Verdict
from tpbench.report.grids.records import MISSING, Record, column_label, problem_identity, value_text
from tpbench.report.numbers.clocks import DEVICE
from tpbench.report.numbers.metric import counted, ratio_text
from tpbench.report.page.cells import MISSING_CELL, PageCell, PageTable, quantity, words
from tpbench.suggestions import printable
from tpbench.workloads import workloads

FACTS = {
    "gpu_name": "GPU", "gpu_count": "GPUs of the node", "nodes": "nodes", "driver_version": "driver",
    "cuda_version": "CUDA", "nccl_version": "NCCL", "torch_version": "torch", "triton_version": "triton",
    "backend": "backend", "python_version": "Python", "os": "system", "cpu_model": "CPU", "cpu_count": "CPU cores",
    "tpbench_version": "tpbench", "kernels_version": "kernels", "git_commit": "commit",
    "git_dirty": "uncommitted changes", "host": "host",
}  # fmt: skip
"""Columns of rows, with the names of the table's columns."""


def machines(records: Iterable[Record]) -> PageTable:
    """Return a table of the distinct combinations, with the number of rows of each. What all rows share is a note."""
    combinations = Counter(tuple(_fact(name, record[name]) for name in FACTS) for record in records).most_common()
    distinct = [len({facts[at] for facts, _ in combinations}) for at in range(len(FACTS))]
    labels = list(FACTS.values())
    varying = [at for at, number_of in enumerate(distinct) if number_of > 1]
    shared = [
        f"{labels[at]} {words(combinations[0][0][at], 80).text}" for at, number in enumerate(distinct) if number == 1
    ]
    rows = [[words(count), *(words(facts[at], 80) for at in varying)] for facts, count in combinations]
    notes = [f"In all rows: {', '.join(shared)}."] if shared else []
    return PageTable("what it ran on", ["rows", *(labels[at] for at in varying)], rows, notes=notes)


def _fact(name: str, value: object) -> object:
    """Return the value of a column. Eight digits identify a commit."""
    return str(value)[:8] if name == "git_commit" and value else value


def period(first: datetime, last: datetime) -> str:
    """Return the days from the first to the last moment."""
    days = dict.fromkeys(f"{each:%Y-%m-%d}" for each in (first, last))
    return " to ".join(days)


def machines_line(records: Iterable[Record], facts: str) -> str:
    """Return the hardware, the hosts and the facts that all rows share, as one sentence."""
    found = list(records)
    models: dict[str, None] = {}
    for record in found:
        name = record["gpu_name"] if record["device"] == "cuda" else record["cpu_model"]
        if name:
            models[printable(str(name), 60)] = None
    hosts = {
        printable(str(record["host"]), 60): record["gpu_count"] if record["device"] == "cuda" else None
        for record in found
        if record["host"]
    }
    named = [f"{host} ({counted(count, 'GPU')})" if count else host for host, count in sorted(hosts.items())]
    where = [f"{'host' if len(named) == 1 else 'hosts'} {', '.join(named)}"] if named else []
    return "; ".join(["/".join(models) or "unknown hardware", *where, *filter(None, [facts])]) + "."


def machines_side_by_side(verdicts: Sequence[Verdict]) -> PageTable | None:
    """Return the fastest variant of each problem on each machine, or None if no problem was measured on two."""
    problems: dict[tuple[tuple[str, Any], ...], dict[str, Verdict]] = defaultdict(dict)
    for verdict in verdicts:
        if verdict.fastest:
            problem = _problem(verdict.grid.workload, verdict.fastest.record)
            problems[problem].setdefault(verdict.grid.facts["hardware"], verdict)
    problems = {problem: machines for problem, machines in problems.items() if len(machines) > 1}
    if not problems:
        return None
    hardware = list(dict.fromkeys(name for machines in problems.values() for name in machines))
    values: dict[str, set[Any]] = defaultdict(set)
    for problem in problems:
        for name, value in problem:
            values[name].add(value)
    rows = []
    for problem, machines in problems.items():
        varying = [f"{column_label(name)}={value}" for name, value in problem[1:] if len(values[name] - {MISSING}) > 1]
        cells = [_fastest(machines.get(name)) for name in hardware]
        rows.append([words(problem[0][1]), words(" ".join(varying), 300), *cells])
    return PageTable("machines side by side", ["workload", "problem", *hardware], rows, keys=2)


def _problem(workload: str, record: Record) -> tuple[tuple[str, Any], ...]:
    """Return the workload and the fields that identify the problem of a record, with their defaults."""
    known = workloads().get(workload)
    defaults = dict.fromkeys(("tokens", "tp_size", "dp_size", "nodes")) | (problem_identity(known) if known else {})
    fields = {name: default if record.get(name) is None else record[name] for name, default in defaults.items()}
    return (("workload", workload), *((name, value_text(value)) for name, value in fields.items()))


def _fastest(verdict: Verdict | None) -> PageCell:
    """Return the fastest variant with its time, and in a second line the runner-up with its ratio."""
    if verdict is None or verdict.fastest is None:
        return MISSING_CELL
    second = verdict.runner_up
    behind = f"{ratio_text(verdict.ratio.value)} {second.column}" if second and verdict.ratio else ""
    clock = "" if verdict.clock is DEVICE else f" {verdict.clock.name}"
    text = f"{verdict.fastest.column} {quantity(verdict.time_ms, 'ms').text}{clock}"
    return PageCell(text, verdict.time_ms, "first", detail=behind)
