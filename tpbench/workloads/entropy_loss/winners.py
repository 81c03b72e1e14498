"""From rows to `tpbench/kernels/block_caps.json`: the fastest block cap of each algorithm, loss and width."""

from __future__ import annotations

from typing import Any

import pandas as pd

from tpbench.settings import JobError

MACHINE = ("gpu_name", "torch_version", "triton_version", "tokens", "dtype")
"""What the rows must agree on: times of other machines and sizes do not compare."""


def choose(rows: pd.DataFrame, source: str) -> dict[str, Any]:
    """The file's content from right, measured rows of `triton_tp` with an algorithm and a block cap of their own.

    Of rows that measured the same twice the last counts. Raises JobError where there are none, or where they are of
    several machines.
    """
    wanted = (rows["variant"] == "triton_tp") & (rows["status"] == "ok") & rows["device_ms"].notna()
    found = rows[wanted & (rows["block_cap"] != "auto")]
    found = found[found["algorithm"].isin(("two_reads", "two_kernels", "one_read"))]
    if found.empty:
        raise JobError(
            "no measured rows of triton_tp with algorithm=two_reads, two_kernels or one_read and a block_cap"
        )
    machines = found[list(MACHINE)].drop_duplicates()
    if len(machines) > 1:
        differing = [name for name in MACHINE if found[name].nunique(dropna=False) > 1]
        raise JobError(f"rows of several machines or sizes: they differ in {', '.join(differing)}")
    found = found.assign(columns=-(-found["vocab"] // found["tp_size"]), cap=found["block_cap"].astype(int))
    found = found.drop_duplicates(["algorithm", "loss", "columns", "cap"], keep="last")
    winners = []
    for _, group in found.groupby(["algorithm", "loss", "columns"], sort=True):
        best = group.sort_values("device_ms").iloc[0]
        winners.append(
            {
                "algorithm": str(best["algorithm"]),
                "loss": str(best["loss"]),
                "columns": int(best["columns"]),
                "block_cap": int(best["cap"]),
                "device_ms": round(float(best["device_ms"]), 4),
                "tried": sorted(int(cap) for cap in group["cap"]),
                "source": source,
            }
        )
    measured_on = {
        name: getattr(value, "item", lambda value=value: value)() for name, value in machines.iloc[0].items()
    }
    return {"measured_on": measured_on, "winners": winners}
