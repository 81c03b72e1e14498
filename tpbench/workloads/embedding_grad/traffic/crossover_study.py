"""Study `crossover`: speed-ups over the dense exchange by density, and the density at which dense becomes faster.

A last column has the crossovers by wall clock, which includes the host's search for the touched rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeAlias

from tpbench.tables import Table
from tpbench.workloads.embedding_grad.problem import WORKLOAD
from tpbench.workloads.embedding_grad.traffic import crossover
from tpbench.workloads.study_data import Panel, Picture, Series, VerticalLine, oldest_first

PREDICTED = "sparse_all_to_all"
"""Variant that the formula of the crossover describes: a gather, all-to-alls and a merge."""


@dataclass(frozen=True)
class Crossover:
    """Density at which the dense exchange becomes faster than a variant."""

    group: GroupKey
    variant: str
    measured: float | None
    predicted: float | None
    """By the formula, which describes all-to-alls alone with nothing beside them."""
    measured_range: str
    """The densities that were measured, if no crossover lies between them."""
    by_wall_clock: str
    """The same of wall times, as text: the density, or the measured range."""

    @property
    def error(self) -> float | None:
        """Predicted over measured, less 1."""
        return None if self.measured is None or self.predicted is None else self.predicted / self.measured - 1


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return a table of speed-ups for each group, and one of the crossovers."""
    times = density_times(rows)
    made = [_speedup_table(group, found) for group, found in _by_group(times).items()]
    if ends := crossovers(times):
        several = _several_softwares(times)
        lines = tuple(
            (
                _crossover_name(end, several),
                end.measured_range or _percent(end.measured),
                _percent(end.predicted),
                _percent(end.error),
                end.by_wall_clock,
            )
            for end in ends
        )
        columns = ("variant", "measured", "predicted", "prediction error", "by wall clock")
        made.append(Table(f"density at which {DENSE} becomes faster", columns, lines))
    return made


def picture(rows: Sequence[Row]) -> Picture | None:
    """Return the speed-ups by density with the crossovers as vertical lines, or None if nothing can be compared.

    If some exchanges ran alone, those beside a stand-in backward are left out: their time is mostly the stand-in's.
    """
    times = [each for each in density_times(rows) if each.speedup is not None]
    alone = [each for each in times if not facts_of(each.group)["overlap_ms"]]
    times = alone or times
    groups = _by_group(times)
    groups = {group: found for group, found in groups.items() if len({each.density for each in found}) > 1} or groups
    ends, several = crossovers(times), _several_softwares(times)
    panels = tuple(_panel(group, found, ends, several) for group, found in groups.items())
    return Picture(panels, "rows touched (%); dashed: by wall clock", f"speed-up over {DENSE}") if panels else None


def _panel(group: GroupKey, times: Iterable[DensityTime], ends: Iterable[Crossover], several: bool) -> Panel:
    points: dict[tuple[str, bool], list[tuple[float, float]]] = defaultdict(list)
    for each in times:
        for speedup, by_wall_clock in ((each.speedup, False), (each.wall_speedup, True)):
            if speedup is not None:
                points[each.variant, by_wall_clock].append((100 * each.density, speedup))
    facts = facts_of(group)
    size = "{table_rows} x {width}, {dp_size} ranks, {distribution}".format(**facts)
    marks = [
        VerticalLine(end.variant, 100 * density, dotted)
        for end in ends
        if end.group == group
        for density, dotted in ((end.measured, False), (end.predicted, True))
        if density is not None
    ]
    lines = tuple(Series(variant, tuple(line), by_wall_clock) for (variant, by_wall_clock), line in points.items())
    return Panel(size + _suffix(facts, several), lines, tuple(marks))


def crossovers(times: Iterable[DensityTime]) -> list[Crossover]:
    """Return the crossover of each sparse variant of each group, measured and predicted.

    Variants that choose the dense exchange themselves have none, and a single density has none.
    """
    lines: dict[tuple[GroupKey, str], list[DensityTime]] = defaultdict(list)
    for each in times:
        if each.dense_ms is not None and not each.variant.startswith(("dense", "sparse_auto")):
            lines[each.group, each.variant].append(each)
    found = []
    for (group, variant), line in lines.items():
        if len(line) < 2:
            continue
        dense_ms = median(each.dense_ms for each in line if each.dense_ms is not None)
        dense_wall_ms = median(each.dense_wall_ms for each in line if each.dense_wall_ms is not None)
        measured, measured_range = _measured([(each.density, each.ms) for each in line], dense_ms)
        by_wall, wall_range = _measured([(each.density, each.wall_ms) for each in line], dense_wall_ms)
        predictions = [each.predicted for each in line if each.predicted is not None]
        described = variant.split()[0] == PREDICTED and not facts_of(group)["overlap_ms"]
        predicted = median(predictions) if described and predictions else None
        found.append(Crossover(group, variant, measured, predicted, measured_range, wall_range or _percent(by_wall)))
    return found


def _measured(points: Sequence[tuple[float, float]], dense_ms: float) -> tuple[float | None, str]:
    """Return the crossover of (density, ms) points in order of density, or None and the measured range as text."""
    found = crossover.measured(points, dense_ms)
    if found is None and points[-1][1] <= dense_ms:
        return None, f"none up to {_percent(points[-1][0])}"
    if found is None and points[0][1] > dense_ms:
        return None, f"dense from {_percent(points[0][0])} on"
    return found, ""


def _by_group(times: Iterable[DensityTime]) -> dict[GroupKey, list[DensityTime]]:
    groups: dict[GroupKey, list[DensityTime]] = defaultdict(list)
    for each in times:
        groups[each.group].append(each)
    return groups


def _several_softwares(times: Iterable[DensityTime]) -> bool:
    return len({facts_of(each.group)["software"] for each in times}) > 1


def _speedup_table(group: GroupKey, times: Sequence[DensityTime]) -> Table:
    facts = {
        name: str(value)
        for name, value in facts_of(group).items()
        if value not in (0.0, "early", "none", "passes", "", None)
    }
    heading = ", ".join(f"{name} {value}" for name, value in facts.items())
    variants = sorted({each.variant for each in times})
    if all(each.dense_ms is None for each in times):
        lone = f"No row of {DENSE} was measured there: there is nothing to compare {', '.join(variants)} with."
        return Table(heading, notes=(lone,))
    cells = {(each.density, each.variant): each.speedup for each in times}
    lines = tuple(
        (_percent(density), *(_times(cells.get((density, variant))) for variant in variants))
        for density in sorted({density for density, _ in cells})
    )
    return Table(heading, ("density", *variants), lines, facts)


def _crossover_name(end: Crossover, several: bool) -> str:
    facts = facts_of(end.group)
    size = "width {width}, {dp_size} ranks, {distribution}".format(**facts)
    return f"{end.variant}, {size}{_suffix(facts, several)}"


def _suffix(facts: Mapping[str, Any], several: bool) -> str:
    """Name what ran beside the exchange; and the software, if there are several versions."""
    beside = ", overlap_ms={overlap_ms:g}, transfers={transfers}".format(**facts) if facts["overlap_ms"] else ""
    beside += ", index={index}".format(**facts) if facts["index"] != "none" else ""
    beside += ", other_mib={other_mib:g}, transfer_order={transfer_order}".format(**facts) if facts["other_mib"] else ""
    return beside + (f", {facts['software'] or 'unknown software'}" if several else "")


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.3g}%"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


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
