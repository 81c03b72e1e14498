"""The label of a row: its variant with the options that it was run with, as reports name it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from tpbench.results.columns import TEXT
from tpbench.settings import spelled
from tpbench.workloads import Workload, workloads

LABEL = "label"
"""Name of the column that `load` computes. No file has it."""


def default_options(workload: Workload | None) -> dict[str, Any]:
    """Return the options that a label names if their value differs from this default."""
    return {**(workload.option_defaults if workload else {"block_cap": "auto"}), "graph": False, "fresh": False}


def chosen_options(row: Mapping[str, Any], workload: Workload | None) -> tuple[tuple[str, Any], ...]:
    """Return the names and values of a row's options that are not the defaults, in declared order."""
    return tuple(
        (name, row[name])
        for name, default in default_options(workload).items()
        if row.get(name) is not None and row[name] != default
    )


def label_columns() -> frozenset[str]:
    """Return the columns from which labels are computed."""
    options = {name for workload in workloads().values() for name in default_options(workload)}
    return frozenset({"workload", "variant", *options, *default_options(None)})


def with_labels(table: pa.Table) -> pa.Table:
    """Return the table with the column `label` after `variant`. Rows of equal options have equal labels."""
    known = workloads()
    names = [name for name in table.column_names if name in label_columns()]
    labels: dict[tuple[Any, ...], str | None] = {}
    texts = []
    for values in zip(*(table.column(name).to_pylist() for name in names), strict=True):
        if values not in labels:
            row = dict(zip(names, values, strict=True))
            options = chosen_options(row, known.get(row["workload"]))
            words = [row["variant"], *(f"{name}={spelled(value)}" for name, value in options)]
            labels[values] = None if row["variant"] is None else " ".join(words)
        texts.append(labels[values])
    return table.add_column(table.column_names.index("variant") + 1, pa.field(LABEL, TEXT), pa.array(texts, TEXT))
