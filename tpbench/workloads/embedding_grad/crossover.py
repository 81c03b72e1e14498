"""Study of the crossover: the density of touched rows at which the dense exchange becomes faster than a sparse one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from tpbench.settings import spelled
from tpbench.tables import Table
from tpbench.workloads.study_data import Picture, Speedups, VerticalLine

DENSE = "dense_reduce_scatter"
CLOCKS = ("device_ms", "time_ms")
SOFTWARE = {"driver_version": "driver", "nccl_version": "NCCL", "torch_version": "torch"}
"""Columns with versions on which a time may depend, with their names. The version of torch includes that of CUDA."""
USUAL = {"overlap_ms": 0.0, "transfers": "early", "index": "none", "other_mib": 0.0, "transfer_order": "passes"}
"""What ran beside the exchange: columns with the value that is not mentioned."""
GROUP = ("hardware", "software", "dtype", "table_rows", "width", "dp_size", "distribution", *USUAL)
"""Columns that must agree for times to be compared over densities. (Of skewed rows, the busiest rank has more.)"""
OPTIONS = {"merge": "triton", "search": "auto", "pinned": True, "graph": False}
"""Options that make another line of a variant, with the value that is not mentioned."""

Row: TypeAlias = Mapping[str, Any]


def groups_of(rows: Sequence[Row]) -> list[Speedups]:
    """Return the speed-ups over a dense reduce-scatter, by density, of all correct rows that can be compared with it.

    Its time is the median over all densities, because it sends the whole table. Of several rows of one density the
    newest counts. A replayed CUDA graph is no baseline, because most sparse exchanges cannot be captured. Rows of
    replayed exchanges are compared with it like the others. The facts have a `suffix`: what ran beside the exchange;
    and the software, if there are several versions.
    """
    frame = comparable(rows)
    if frame.empty:
        return []
    frame = frame.drop_duplicates([*GROUP, "line", "density"], keep="last")
    several = frame[frame["line"] != DENSE]["software"].nunique() > 1
    groups = []
    for key, cells in frame.groupby(list(GROUP), dropna=False):
        facts = dict(zip(GROUP, key, strict=True))
        suffix = "".join(f", {name}={spelled(facts[name])}" for name, usual in USUAL.items() if facts[name] != usual)
        suffix += f", {facts['software'] or 'unknown software'}" if several else ""
        times = cells.pivot(index="density", columns="line", values=list(CLOCKS)).astype(float)
        groups.append(Speedups.over(DENSE, times, {**facts, "suffix": suffix}, median=True))
    return [group for group in groups if group.axis]


def comparable(rows: Sequence[Row]) -> pd.DataFrame:
    """Return the correct rows of real devices, the newest last, with what their comparison needs."""
    found = []
    for row in rows:
        if row["status"] == "ok" and not row["interpreted"]:
            versions = [f"{name} {row[column]}" for column, name in SOFTWARE.items() if row[column] is not None]
            options = [(name, row.get(name)) for name, usual in OPTIONS.items() if row.get(name) not in (None, usual)]
            more = {
                **{name: usual if row.get(name) is None else row[name] for name, usual in USUAL.items()},
                "hardware": row["gpu_name"] or row["cpu_model"] or "unknown",
                "software": " ".join(versions),
                "line": " ".join([row["variant"], *(f"{name}={value}".lower() for name, value in options)]),
                "density": round(float(row["density"]), 4),
                "device_ms": row["time_ms"] if row["device_ms"] is None else row["device_ms"],
            }
            found.append({**row, **more})
    frame = pd.DataFrame(found)
    return frame.sort_values("started_at", na_position="first", kind="stable") if found else frame


def crossovers(group: Speedups) -> Iterator[tuple[str, dict[str, tuple[float | None, str]]]]:
    """Yield each sparse variant with its crossover by clock: the density, or None, and a text about it.

    Variants that choose the dense exchange themselves have none, and a single density has none.
    """
    for name in group.names:
        by_clock = {clock: ratios[name].dropna() for clock, ratios in group.by_clock.items()}
        if len(by_clock["device_ms"]) > 1 and not name.startswith(("dense", "sparse_auto")):
            yield name, {clock: _crossover(ratios) for clock, ratios in by_clock.items()}


def _crossover(ratios: pd.Series[float]) -> tuple[float | None, str]:
    """Interpolate between the first two densities whose times enclose that of the dense exchange."""
    densities, slower = ratios.index.to_numpy(), (ratios < 1).to_numpy()
    crossed = np.flatnonzero(~slower[:-1] & slower[1:])
    if len(crossed):
        here = slice(crossed[0], crossed[0] + 2)
        density = float(np.interp(1.0, 1 / ratios.to_numpy()[here], densities[here]))
        return density, f"{100 * density:.3g}%"
    if slower[-1]:
        return None, f"dense from {100 * densities[0]:.3g}% on"
    return None, f"none up to {100 * densities[-1]:.3g}%"


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return a table of speed-ups by device time for each group, and one of the crossovers by both clocks."""
    groups = groups_of(rows)
    made = [_speedup_table(group) for group in groups]
    lines = []
    for group in groups:
        size = "width {width}, {dp_size} ranks, {distribution}{suffix}".format(**group.facts)
        for name, by_clock in crossovers(group):
            lines.append((f"{name}, {size}", *(text for _, text in by_clock.values())))
    if lines:
        columns = ("variant", "by device time", "by wall clock")
        made.append(Table(f"density at which {DENSE} becomes faster", columns, lines))
    return made


def _speedup_table(group: Speedups) -> Table:
    facts = {name: str(group.facts[name]) for name in GROUP if group.facts[name] not in (USUAL.get(name), "", None)}
    texts = group.by_clock["device_ms"].map("{:.2f}x".format, na_action="ignore").fillna("-")
    lines = [(f"{100 * density:.3g}%", *values) for density, *values in texts.itertuples(name=None)]
    heading = ", ".join(f"{name} {value}" for name, value in facts.items())
    return Table(heading, ("density", *texts.columns), lines, facts)


def picture(rows: Sequence[Row]) -> Picture | None:
    """Return the speed-ups by density with the crossovers as vertical lines, or None if nothing can be compared.

    If some exchanges ran alone, those beside a stand-in backward are left out: their time is mostly the stand-in's.
    """
    groups = groups_of(rows)
    groups = [group for group in groups if not group.facts["overlap_ms"]] or groups
    groups = [group for group in groups if group.by_clock["device_ms"].count().max() > 1] or groups
    panels = []
    for group in groups:
        marks = ((name, by_clock["device_ms"][0]) for name, by_clock in crossovers(group))
        vertical_lines = [VerticalLine(name, 100 * density) for name, density in marks if density is not None]
        title = "{table_rows} x {width}, {dp_size} ranks, {distribution}{suffix}".format(**group.facts)
        panels.append(group.panel(title, 100, vertical_lines))
    return (
        Picture(tuple(panels), "rows touched (%); dashed: by wall clock", f"speed-up over {DENSE}") if panels else None
    )
