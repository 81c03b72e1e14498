"""Times of exchanges by density, in groups of rows that are comparable.

Rows are comparable if they agree in the columns of `GROUP`: one table, world size, distribution and kind of machine,
under one driver, NCCL and torch. They differ in how many rows are touched. Dates, hosts and versions of tpbench may
differ, because the newest row of a cell counts. Device times are used if there are any. Interpreted rows are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeAlias

from tpbench.workloads.embedding_grad.problem import WORKLOAD
from tpbench.workloads.study_data import oldest_first

DENSE = "dense_reduce_scatter"
SOFTWARE = {"driver_version": "driver", "nccl_version": "NCCL", "torch_version": "torch"}
"""Columns with versions on which a time may depend, with their names. The version of torch includes that of CUDA."""
GROUP = (
    "hardware", "software", "dtype", "table_rows", "width", "dp_size", "distribution", "overlap_ms", "transfers",
    "index", "other_mib", "transfer_order",
)  # fmt: skip
"""Columns that must agree for times to be compared over densities. (Of skewed rows, the busiest rank has more.)"""
OPTIONS = {name: WORKLOAD.option_defaults[name] for name in ("merge", "search", "pinned")} | {"graph": False}
"""Options that make another column of a variant, with the value that is not mentioned."""

Row: TypeAlias = Mapping[str, Any]
GroupKey: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True)
class DensityTime:
    """Time of one variant at one density."""

    group: GroupKey
    """Values of the columns of `GROUP`."""
    variant: str
    """The variant and the options that it was run with."""
    density: float
    ms: float
    dense_ms: float | None
    """Time of the dense reduce-scatter, if any was measured in the group."""
    wall_ms: float
    dense_wall_ms: float | None
    predicted: float | None
    """Density of the crossover by the formula."""

    @property
    def speedup(self) -> float | None:
        """Ratio of the dense time and this one."""
        return None if self.dense_ms is None else self.dense_ms / self.ms

    @property
    def wall_speedup(self) -> float | None:
        """The same ratio of wall times."""
        return None if self.dense_wall_ms is None else self.dense_wall_ms / self.wall_ms


def density_times(rows: Sequence[Row]) -> list[DensityTime]:
    """Return the time of each correct row but those of the dense reduce-scatter, by group, variant and density.

    `dense_ms` is the time of the newest dense row of the same density, or the median over those of any density, because
    a dense exchange sends the whole table. A replayed CUDA graph is no baseline, because most sparse exchanges cannot
    be captured. Rows of replayed exchanges are compared with it like the others.
    """
    newest: dict[tuple[Any, ...], Row] = {}
    for row in oldest_first(rows):
        if row["status"] == "ok" and not row["interpreted"]:
            newest[_group_of(row), _variant_of(row), round(float(row["density"]), 4)] = row
    walls = {key: float(row["time_ms"]) for key, row in newest.items()}
    times = {key: float(row["time_ms" if row["device_ms"] is None else "device_ms"]) for key, row in newest.items()}
    found = []
    for key in sorted((key for key in times if key[1] != DENSE), key=_order):
        group, variant, density = key
        dense_ms, dense_wall_ms = _dense_time(times, group, density), _dense_time(walls, group, density)
        predicted = newest[key]["predicted_crossover"]
        found.append(DensityTime(group, variant, density, times[key], dense_ms, walls[key], dense_wall_ms, predicted))
    return found


def _dense_time(times: Mapping[tuple[GroupKey, str, float], float], group: GroupKey, density: float) -> float | None:
    """Return the time of the dense reduce-scatter at a density, else the median over densities, else None."""
    dense = {key[2]: ms for key, ms in times.items() if key[:2] == (group, DENSE)}
    return dense.get(density, median(dense.values())) if dense else None


def facts_of(group: GroupKey) -> dict[str, Any]:
    """Return the values of a group by the columns of `GROUP`."""
    return dict(zip(GROUP, group, strict=True))


def _order(key: tuple[GroupKey, str, float]) -> tuple[Any, ...]:
    group, variant, density = key
    return ([(value is None, value) for value in group], variant, density)


def _group_of(row: Row) -> GroupKey:
    hardware = row["gpu_name"] or row["cpu_model"] or "unknown"
    software = " ".join(f"{label} {row[name]}" for name, label in SOFTWARE.items() if row[name] is not None)
    return (hardware, software, *(row.get(name) for name in GROUP[2:]))


def _variant_of(row: Row) -> str:
    options = ((name, row.get(name)) for name, default in OPTIONS.items() if row.get(name) not in (None, default))
    return " ".join([row["variant"], *(f"{name}={value}".lower() for name, value in options)])
