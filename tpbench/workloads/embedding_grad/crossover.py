"""Study of the crossover: the density of touched rows at which the dense exchange becomes faster than a sparse one.

It is of exchanges alone. What they add to a training step says the study `ablation`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from tpbench.tables import Table, TableCell, number_cell, value_item
from tpbench.workloads.embedding_grad.problem import DENSE, is_dense
from tpbench.workloads.study_data import Picture, Speedups, oldest_first

CLOCKS = ("device_ms", "time_ms")
SOFTWARE = {"driver_version": "driver", "nccl_version": "NCCL", "torch_version": "torch"}
"""Columns with versions on which a time may depend, with their names. The version of torch includes that of CUDA."""
GROUP = ("hardware", "software", "dtype", "table_rows", "width", "dp_size", "distribution")
"""Columns that must agree for times to be compared over densities. (Of skewed rows, the busiest rank has more.)"""

Row: TypeAlias = Mapping[str, Any]


def groups_of(rows: Sequence[Row]) -> list[Speedups]:
    """Return the speed-ups over a dense reduce-scatter, by density, of all correct rows that can be compared with it.

    Its time is the median over all densities, because it sends the whole table. Of several rows of one density the
    newest counts. A replayed CUDA graph isn't a baseline, because most sparse exchanges cannot be captured. Rows of
    replayed exchanges are compared with it like the others.
    """
    frame = comparable(row for row in rows if not row["overlap_ms"])
    if frame.empty:
        return []
    frame = frame.drop_duplicates([*GROUP, "label", "density"], keep="last")
    groups = []
    for key, cells in frame.groupby(list(GROUP), dropna=False):
        times = cells.pivot(index="density", columns="label", values=list(CLOCKS)).astype(float)
        groups.append(Speedups.over(DENSE, times, dict(zip(GROUP, key, strict=True)), median=True))
    return [group for group in groups if group.axis]


def comparable(rows: Iterable[Row]) -> pd.DataFrame:
    """Return the rows, the newest last, with what their comparison needs."""
    lines = []
    for row in oldest_first(rows):
        versions = [f"{name} {row[column]}" for column, name in SOFTWARE.items() if row[column] is not None]
        more = {
            "hardware": row["gpu_name"] or row["cpu_model"] or "unknown",
            "software": " ".join(versions) or "unknown software",
            "density": round(float(row["density"]), 4),
            "device_ms": row["time_ms"] if row["device_ms"] is None else row["device_ms"],
        }
        lines.append({**row, **more})
    return pd.DataFrame(lines)


def _crossover(ratios: "pd.Series[float]") -> TableCell:
    """Interpolate between the first two densities whose times enclose that of the dense exchange."""
    densities, slower = ratios.index.to_numpy(), (ratios < 1).to_numpy()
    crossed = np.flatnonzero(~slower[:-1] & slower[1:])
    if len(crossed):
        here = slice(crossed[0], crossed[0] + 2)
        return number_cell(float(np.interp(1.0, 1 / ratios.to_numpy()[here], densities[here])), _percent)
    return TableCell(
        f"dense from {_percent(densities[0])} on" if slower[-1] else f"none up to {_percent(densities[-1])}"
    )


def _percent(density: float) -> str:
    return f"{100 * density:.3g}%"


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return a table of speed-ups by device time for each group, and one of the crossovers by both clocks."""
    groups, dense = groups_of(rows), {row["label"] for row in rows if is_dense(row["variant"])}
    made = [_speedup_table(group) for group in groups]
    lines: list[tuple[TableCell | str, ...]] = [
        (
            f"{name}, width {_size(group, groups)}",
            *(_crossover(ratios[name].dropna()) for ratios in group.by_clock.values()),
        )
        for group in groups
        for name in group.names
        if group.by_clock["device_ms"][name].count() > 1 and name not in dense
    ]
    if lines:
        columns = ("variant", "by device time", "by wall clock")
        made.append(Table(f"density at which {DENSE} becomes faster", columns, lines))
    return made


def _size(group: Speedups, groups: Sequence[Speedups]) -> str:
    software = {of_problem.facts["software"] for of_problem in groups}
    return "{width}, {dp_size} ranks, {distribution}".format(**group.facts) + (
        f", {group.facts['software']}" if len(software) > 1 else ""
    )


def _speedup_table(group: Speedups) -> Table:
    facts = {name: value_item(value) for name, value in group.facts.items()}
    ratios = group.by_clock["device_ms"]
    lines = [
        [number_cell(density, _percent), *(number_cell(None if math.isnan(x) else x, "{:.2f}x".format) for x in values)]
        for density, *values in ratios.itertuples(name=None)
    ]
    heading = ", ".join(f"{name} {value}" for name, value in facts.items())
    return Table(heading, ("density", *ratios.columns), lines, facts)


def picture(rows: Sequence[Row]) -> Picture | None:
    """Return the speed-ups by density or None if nothing can be compared."""
    groups = groups_of(rows)
    several = [group for group in groups if len(group.axis) > 1] or groups
    panels = [group.panel(f"{group.facts['table_rows']} x {_size(group, groups)}", 100) for group in several]
    labels = "rows touched (%); dashed: by wall clock", f"speed-up over {DENSE}"
    return Picture(tuple(panels), *labels) if panels else None
