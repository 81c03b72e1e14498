"""Study of the speed record's changes: sparse exchange, early index, order of transfers; and of the bytes sent."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from tpbench.tables import Table, TableCell, number_cell, value_item
from tpbench.workloads.embedding_grad.crossover import comparable
from tpbench.workloads.embedding_grad.problem import WORKLOAD, rounded_density
from tpbench.workloads.sizes import ITEM_BYTES

INDEXES = ("none", "late", "pinned", "early", "device")
ORDERS = {"alone": "no other transfers"} | {name: f"order {name}" for name in ("passes", "first", "between", "last")}
STEP = ("hardware", "dtype", "table_rows", "width", "tokens", "dp_size", "overlap_ms")
"""Columns that must agree for steps to be compared, if their tokens are bigrams of a text."""
SENT = ("table_rows", "width", "dp_size", "distribution", "tokens", "density")
"""Columns on which the number of sent bytes depends, beside the exchange and the dtype."""
EMBEDDING_AND_HEAD = 2 * 50304
"""Rows of both tables in the speed record's model, which are as wide as the table of bigrams."""


def tables(rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Return a factorial of the exposed times of each problem, as far as there are rows, and the sent megabytes."""
    frame = comparable(rows)
    if frame.empty:
        return []
    steps = frame[(frame["overlap_ms"] > 0) & (frame["distribution"] == "zipf_bigram")]
    return [
        *(_factorial(dict(zip(STEP, key, strict=True)), step) for key, step in steps.groupby(list(STEP))),
        _sent(frame),
    ]


def _factorial(facts: Mapping[str, Any], steps: pd.DataFrame) -> Table:
    steps = steps.assign(order=steps["transfer_order"].where(steps["other_mib"] > 0, "alone"))
    for column, values in {"label": [*WORKLOAD.variants, *steps["label"]], "index": INDEXES, "order": ORDERS}.items():
        steps[column] = pd.Categorical(steps[column], [*dict.fromkeys(values)])
    exposed = steps.pivot_table("exposed_ms", ["label", "index"], "order", aggfunc="last", observed=True)
    lines = [
        (*key, *("no row" if math.isnan(ms) else number_cell(ms, "{:.3f}".format) for ms in times))
        for key, *times in exposed.itertuples(name=None)
    ]
    heading = "exposed_ms: " + ", ".join(f"{name} {value}" for name, value in facts.items())
    return Table(heading, ("exchange", "index", *(ORDERS[str(order)] for order in exposed)), lines)


def _sent(frame: pd.DataFrame) -> Table:
    newest = frame.drop_duplicates(["variant", "dtype", *SENT], keep="last").sort_values([*SENT, "variant"])
    records: Any = newest.to_dict("records")
    lines = []
    for row in records:
        peers, row_mb = row["dp_size"] - 1, row["width"] * ITEM_BYTES[row["dtype"]] / 1e6
        sent = row["bytes_communicated"] / 1e6
        shares = [
            sent / (-(-size // row["dp_size"]) * peers * row_mb) for size in (row["table_rows"], EMBEDDING_AND_HEAD)
        ]
        problem = [TableCell(str(row[name]), value_item(row[name])) for name in SENT[:-1]]
        density, megabytes = number_cell(rounded_density(row), "{:.3g}".format), number_cell(sent, "{:.4g}".format)
        of_tables = (number_cell(share, "{:.1%}".format) for share in shares)
        lines.append((*problem, density, row["variant"], megabytes, *of_tables))
    names = (*SENT, "exchange", "MB sent", "of the whole table", "of embedding and head")
    return Table("megabytes that the busiest rank sends, against reduce-scatters of whole tables", names, tuple(lines))
