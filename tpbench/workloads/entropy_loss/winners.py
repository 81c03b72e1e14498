"""Choose the block caps of `tpbench/kernels/block_caps.json`: the fastest for each algorithm, loss and width."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from tpbench.settings import JobError

Row = Mapping[str, Any]
MACHINE = ("gpu_name", "torch_version", "triton_version", "tokens", "dtype")
"""Columns in which all rows must agree: times of other machines and sizes are not comparable."""


def choose(rows: Sequence[Row], source: str) -> dict[str, Any]:
    """Return the file's content from measured rows of `triton_tp` that set an algorithm and a block cap.

    If two rows measured the same, the last one counts. Raises JobError if there are no such rows, or if they are of
    several machines or sizes.
    """
    rows = [row for row in rows if _is_usable(row)]
    if not rows:
        raise JobError("no measured rows of triton_tp with an algorithm and a block_cap of their own")
    values = {name: {row[name] for row in rows} for name in MACHINE}
    if differing := [name for name in MACHINE if len(values[name]) > 1]:
        raise JobError(f"rows of several machines or sizes: they differ in {', '.join(differing)}")
    tried: dict[tuple[str, str, int], dict[int, float]] = defaultdict(dict)
    for row in rows:
        columns = -(-row["vocab"] // row["tp_size"])
        tried[row["algorithm"], row["loss"], columns][int(row["block_cap"])] = row["device_ms"]
    return {
        "measured_on": {name: rows[0][name] for name in MACHINE},
        "winners": [_winner(*place, tried[place], source) for place in sorted(tried)],
    }


def _is_usable(row: Row) -> bool:
    measured = row["variant"] == "triton_tp" and row["status"] == "ok" and row["device_ms"] is not None
    return measured and row["block_cap"] not in (None, "auto") and row["algorithm"] not in (None, "auto")


def _winner(algorithm: str, loss: str, columns: int, tried: Mapping[int, float], source: str) -> dict[str, Any]:
    block_cap = min(tried, key=lambda cap: (tried[cap], cap))
    return {
        "algorithm": algorithm,
        "loss": loss,
        "columns": columns,
        "block_cap": block_cap,
        "device_ms": round(float(tried[block_cap]), 4),
        "tried": sorted(tried),
        "source": source,
    }
