"""Study of the crossover: the density of touched rows at which the dense exchange becomes faster than a sparse one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pandas as pd

from tpbench.settings import spelled
from tpbench.tables import Table
from tpbench.workloads.study_data import Panel, Picture, Series, VerticalLine

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


class Group(NamedTuple):
    """Times that can be compared with those of a dense reduce-scatter."""

    facts: Row
    """Values of the columns of `GROUP`."""
    dense: pd.Series[float]
    """Medians of the dense times by clock, over all densities, because a dense exchange sends the whole table."""
    lines: Mapping[str, pd.DataFrame]
    """By variant with options: times by density, with a column for each clock."""
    suffix: str
    """What ran beside the exchange; and the software, if there are several versions."""


def groups_of(rows: Sequence[Row]) -> list[Group]:
    """Return the times of all correct rows that can be compared with a dense reduce-scatter.

    Of several rows of one density the newest counts. A replayed CUDA graph is no baseline, because most sparse
    exchanges cannot be captured. Rows of replayed exchanges are compared with it like the others.
    """
    frame = comparable(rows)
    if frame.empty:
        return []
    frame = frame.drop_duplicates([*GROUP, "line", "density"], keep="last").sort_values(["line", "density"])
    several = frame[frame["line"] != DENSE]["software"].nunique() > 1
    groups = []
    for key, times in frame.groupby(list(GROUP), dropna=False):
        facts = dict(zip(GROUP, key, strict=True))
        lines = {str(name): line.set_index("density")[list(CLOCKS)] for name, line in times.groupby("line")}
        dense = lines.pop(DENSE, None)
        if dense is not None and lines:
            groups.append(Group(facts, dense.median(), lines, _suffix(facts, several)))
    return groups


def comparable(rows: Sequence[Row]) -> pd.DataFrame:
    """Return the correct rows of real devices, the newest last, with what their comparison needs."""
    found = [_comparable(row) for row in rows if row["status"] == "ok" and not row["interpreted"]]
    frame = pd.DataFrame(found)
    return frame.sort_values("started_at", na_position="first", kind="stable") if found else frame


def _comparable(row: Row) -> dict[str, Any]:
    options = ((name, row.get(name)) for name, usual in OPTIONS.items() if row.get(name) not in (None, usual))
    return {
        **row,
        **{name: usual if row.get(name) is None else row[name] for name, usual in USUAL.items()},
        "hardware": row["gpu_name"] or row["cpu_model"] or "unknown",
        "software": " ".join(f"{name} {row[column]}" for column, name in SOFTWARE.items() if row[column] is not None),
        "line": " ".join([row["variant"], *(f"{name}={value}".lower() for name, value in options)]),
        "density": round(float(row["density"]), 4),
        "device_ms": row["time_ms"] if row["device_ms"] is None else row["device_ms"],
    }


def _suffix(facts: Row, several: bool) -> str:
    beside = "".join(f", {name}={spelled(facts[name])}" for name, usual in USUAL.items() if facts[name] != usual)
    return beside + (f", {facts['software'] or 'unknown software'}" if several else "")


def crossovers(group: Group) -> Iterator[tuple[str, dict[str, tuple[float | None, str]]]]:
    """Yield each sparse variant with its crossover by clock: the density, or None, and a text about it.

    Variants that choose the dense exchange themselves have none, and a single density has none.
    """
    for name, line in group.lines.items():
        if len(line) > 1 and not name.startswith(("dense", "sparse_auto")):
            yield name, {clock: _crossover(line[clock], group.dense[clock]) for clock in CLOCKS}


def _crossover(times: pd.Series[float], dense_ms: float) -> tuple[float | None, str]:
    """Interpolate between the first two densities whose times enclose that of the dense exchange."""
    densities, slower = times.index.to_numpy(), (times > dense_ms).to_numpy()
    crossed = np.flatnonzero(~slower[:-1] & slower[1:])
    if len(crossed):
        here = slice(crossed[0], crossed[0] + 2)
        density = float(np.interp(dense_ms, times.to_numpy()[here], densities[here]))
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
        size = "width {width}, {dp_size} ranks, {distribution}".format(**group.facts) + group.suffix
        for name, by_clock in crossovers(group):
            lines.append((f"{name}, {size}", *(text for _, text in by_clock.values())))
    if lines:
        columns = ("variant", "by device time", "by wall clock")
        made.append(Table(f"density at which {DENSE} becomes faster", columns, tuple(lines)))
    return made


def _speedup_table(group: Group) -> Table:
    facts = {name: str(value) for name, value in group.facts.items() if value not in (USUAL.get(name), "", None)}
    speedups = pd.DataFrame({name: group.dense["device_ms"] / line["device_ms"] for name, line in group.lines.items()})
    texts = speedups.sort_index().map("{:.2f}x".format, na_action="ignore").fillna("-")
    lines = tuple((f"{100 * density:.3g}%", *values) for density, *values in texts.itertuples(name=None))
    return Table(
        ", ".join(f"{name} {value}" for name, value in facts.items()), ("density", *texts.columns), lines, facts
    )


def picture(rows: Sequence[Row]) -> Picture | None:
    """Return the speed-ups by density with the crossovers as vertical lines, or None if nothing can be compared.

    If some exchanges ran alone, those beside a stand-in backward are left out: their time is mostly the stand-in's.
    """
    groups = groups_of(rows)
    groups = [group for group in groups if not group.facts["overlap_ms"]] or groups
    groups = [group for group in groups if any(len(line) > 1 for line in group.lines.values())] or groups
    panels = tuple(map(_panel, groups))
    return Picture(panels, "rows touched (%); dashed: by wall clock", f"speed-up over {DENSE}") if panels else None


def _panel(group: Group) -> Panel:
    lines = []
    for name, times in group.lines.items():
        for clock in CLOCKS:
            points = zip(100 * times.index, group.dense[clock] / times[clock], strict=True)
            lines.append(Series(name, tuple(points), clock == "time_ms"))
    marks = ((name, by_clock["device_ms"][0]) for name, by_clock in crossovers(group))
    vertical_lines = tuple(VerticalLine(name, 100 * density) for name, density in marks if density is not None)
    size = "{table_rows} x {width}, {dp_size} ranks, {distribution}".format(**group.facts)
    return Panel(size + group.suffix, tuple(lines), vertical_lines)
