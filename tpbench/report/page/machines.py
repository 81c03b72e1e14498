"""Machines and software versions on which the rows were measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

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
