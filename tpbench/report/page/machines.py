"""Machines and software versions on which the rows were measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tpbench.report.escape import printable
from tpbench.report.page.cells import PageTable, words
from tpbench.report.records import Record

FACTS = {
    "gpu_name": "GPU", "gpu_count": "GPUs of the node", "nodes": "nodes", "driver_version": "driver",
    "cuda_version": "CUDA", "nccl_version": "NCCL", "torch_version": "torch", "triton_version": "triton",
    "backend": "backend", "python_version": "Python", "os": "system", "cpu_model": "CPU", "cpu_count": "CPU cores",
    "tpbench_version": "tpbench", "kernels_version": "kernels", "git_commit": "commit",
    "git_dirty": "uncommitted changes", "host": "host",
}  # fmt: skip
"""Columns of rows, with the names of the table's columns."""


def machines(records: Iterable[Record]) -> PageTable:
    """Return a table of the distinct combinations, with the number of rows of each."""
    counted = Counter(tuple(record[name] for name in FACTS) for record in records)
    rows = [[words(count), *(words(value, 80) for value in facts)] for facts, count in counted.most_common()]
    return PageTable("what it ran on", ["rows", *FACTS.values()], rows, keys=0)


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
    named = [f"{host} ({count} GPUs)" if count else host for host, count in sorted(hosts.items())]
    where = [f"hosts {', '.join(named)}"] if named else []
    return "; ".join(["/".join(models) or "unknown hardware", *where, *filter(None, [facts])]) + "."
