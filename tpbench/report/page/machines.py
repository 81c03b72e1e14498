"""Machines and software versions on which the rows were measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import datetime

from tpbench.report.grids.records import Record
from tpbench.report.numbers.metric import counted
from tpbench.report.page.cells import PageTable, words
from tpbench.results.printable import printable

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
