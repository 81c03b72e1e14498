"""Crossover: the density of touched rows at which the dense exchange becomes faster than a sparse one.

It is predicted by a formula, and measured in the study `crossover`: speed-ups over the dense exchange by density.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple, TypeAlias

from tpbench.tables import Table
from tpbench.workloads.embedding_grad.problem import WORKLOAD
from tpbench.workloads.study_data import Panel, Picture, Series, VerticalLine, oldest_first

HBM_PASSES = 5
"""Passes of each touched row through memory besides the transfer: gather (read, write) and merge (2 reads, write)."""
STEPS = 5
"""Successive steps of the sparse exchange on the device: upload and exchange row numbers, gather, exchange rows, merge.

Each step costs at least about as much as an all-to-all of almost nothing: on two H200s together 0.06 to 0.07 ms, where
such an all-to-all takes 0.0105 ms. Counts travel between hosts in the meantime.
"""
ID_BYTES = 4
"""Bytes of a row number."""


def predicted(
    table_rows: int, row_bytes: int, world_size: int, copy_gb_per_s: float, link_rates: Mapping[str, Any]
) -> float:
    """Return the density rho, in [0, 1], at which both exchanges take equal time by this formula:

    rho [(1 + 4 / (d b)) / B_a2a + 5 / B_hbm + 4 / (d b) W / (W - 1) / B_up] + 5 alpha / (N d b (W - 1) / W) = 1 / B_rs

    The table has N rows of d columns with b bytes an element, and W ranks own equal shares. The numbers of all touched
    rows are uploaded, also of those that this rank owns, except on CPUs, where `upload_gb_per_s` is None.
    """
    dense_bytes = table_rows * row_bytes * (world_size - 1) / world_size
    waiting = STEPS * link_rates["latency_ms"] * 1e6 / dense_bytes  # ns a byte, as the inverse bandwidths are
    byte = (1 + ID_BYTES / row_bytes) / link_rates["all_to_all_gb_per_s"] + HBM_PASSES / copy_gb_per_s
    if link_rates["upload_gb_per_s"] is not None:
        byte += ID_BYTES / row_bytes * world_size / (world_size - 1) / link_rates["upload_gb_per_s"]
    density: float = (1 / link_rates["reduce_scatter_gb_per_s"] - waiting) / byte
    return min(1.0, max(0.0, density))


DENSE = "dense_reduce_scatter"
PREDICTED = "sparse_all_to_all"
"""Variant that the formula describes: a gather, all-to-alls and a merge, with nothing beside them."""
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


class Point(NamedTuple):
    """Times of a variant at one density, in ms: of the device, and by wall clock."""

    density: float
    times: tuple[float, float]
    dense: tuple[float, float]
    """The same two times of the dense reduce-scatter."""
    predicted: float | None
    """Density of the crossover by the formula."""

    @property
    def speedups(self) -> tuple[float, float]:
        """Ratios of the dense times and these."""
        return self.dense[0] / self.times[0], self.dense[1] / self.times[1]


class Group(NamedTuple):
    """Points that can be compared, by the variant and the options that it was run with, in order of density."""

    facts: Mapping[str, Any]
    """Values of the columns of `GROUP`."""
    lines: Mapping[str, Sequence[Point]]
    suffix: str
    """What ran beside the exchange; and the software, if there are several versions."""


class Crossover(NamedTuple):
    """Density at which the dense exchange becomes faster than a variant."""

    variant: str
    measured: float | None
    predicted: float | None
    texts: tuple[str, str]
    """The density by each clock, or the densities that were measured if no crossover lies between them."""


def groups_of(rows: Sequence[Row]) -> list[Group]:
    """Return the times of all correct rows that can be compared with a dense reduce-scatter.

    A dense time is that of the newest dense row of the same density, or the median over those of any density, because a
    dense exchange sends the whole table. A replayed CUDA graph is no baseline, because most sparse exchanges cannot be
    captured. Rows of replayed exchanges are compared with it like the others.
    """
    newest: dict[tuple[Any, ...], dict[str, dict[float, Row]]] = defaultdict(lambda: defaultdict(dict))
    for row in oldest_first(rows):
        if row["status"] == "ok" and not row["interpreted"]:
            newest[_group_of(row)][_variant_of(row)][round(float(row["density"]), 4)] = row
    several = len({key[1] for key, lines in newest.items() if lines.keys() - {DENSE}}) > 1
    groups = []
    for key in sorted(newest, key=lambda key: [(value is None, value) for value in key]):
        facts, lines = dict(zip(GROUP, key, strict=True)), newest[key]
        dense = {density: _times_of(row) for density, row in lines.pop(DENSE, {}).items()}
        if not dense or not lines:
            continue
        usual = _medians(dense.values())
        points = {
            variant: [
                Point(density, _times_of(row), dense.get(density, usual), row["predicted_crossover"])
                for density, row in sorted(lines[variant].items())
            ]
            for variant in sorted(lines)
        }
        groups.append(Group(facts, points, _suffix(facts, several)))
    return groups


def _times_of(row: Row) -> tuple[float, float]:
    return float(row["time_ms" if row["device_ms"] is None else "device_ms"]), float(row["time_ms"])


def _medians(times: Iterable[tuple[float, float]]) -> tuple[float, float]:
    on_device, by_wall_clock = zip(*times, strict=True)
    return median(on_device), median(by_wall_clock)


def _group_of(row: Row) -> tuple[Any, ...]:
    hardware = row["gpu_name"] or row["cpu_model"] or "unknown"
    software = " ".join(f"{label} {row[name]}" for name, label in SOFTWARE.items() if row[name] is not None)
    return (hardware, software, *(row.get(name) for name in GROUP[2:]))


def _variant_of(row: Row) -> str:
    options = ((name, row.get(name)) for name, default in OPTIONS.items() if row.get(name) not in (None, default))
    return " ".join([row["variant"], *(f"{name}={value}".lower() for name, value in options)])


def _suffix(facts: Row, several: bool) -> str:
    beside = ", overlap_ms={overlap_ms:g}, transfers={transfers}".format(**facts) if facts["overlap_ms"] else ""
    beside += ", index={index}".format(**facts) if facts["index"] != "none" else ""
    beside += ", other_mib={other_mib:g}, transfer_order={transfer_order}".format(**facts) if facts["other_mib"] else ""
    return beside + (f", {facts['software'] or 'unknown software'}" if several else "")


def crossovers(group: Group) -> Iterator[Crossover]:
    """Yield the crossover of each sparse variant, measured and predicted.

    Variants that choose the dense exchange themselves have none, and a single density has none.
    """
    for variant, line in group.lines.items():
        if len(line) < 2 or variant.startswith(("dense", "sparse_auto")):
            continue
        device, wall = (
            _measured([(point.density, point.times[clock]) for point in line], dense_ms)
            for clock, dense_ms in enumerate(_medians(point.dense for point in line))
        )
        predictions = [point.predicted for point in line if point.predicted is not None]
        described = variant.split()[0] == PREDICTED and not group.facts["overlap_ms"]
        prediction = median(predictions) if described and predictions else None
        yield Crossover(variant, device[0], prediction, (device[1], wall[1]))


def _measured(points: Sequence[tuple[float, float]], dense_ms: float) -> tuple[float | None, str]:
    """Return the density at which a sparse exchange takes `dense_ms`, or None, and a text about it.

    Interpolates between the first two of the (density, ms) points, in order of density, that enclose the dense time.
    """
    for (low, fast), (high, slow) in itertools.pairwise(points):
        if fast <= dense_ms < slow:
            density = low + (high - low) * (dense_ms - fast) / (slow - fast)
            return density, _percent(density)
    if points[-1][1] <= dense_ms:
        return None, f"none up to {_percent(points[-1][0])}"
    return None, f"dense from {_percent(points[0][0])} on" if points[0][1] > dense_ms else "-"


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return a table of speed-ups for each group, and one of the crossovers.

    The last column has the crossovers by wall clock, which includes the host's search for the touched rows.
    """
    groups = groups_of(rows)
    made = [_speedup_table(group) for group in groups]
    lines = []
    for group in groups:
        size = "width {width}, {dp_size} ranks, {distribution}".format(**group.facts) + group.suffix
        for end in crossovers(group):
            error = end.predicted / end.measured - 1 if end.measured and end.predicted is not None else None
            predicted = (_percent(end.predicted), _percent(error))
            lines.append((f"{end.variant}, {size}", end.texts[0], *predicted, end.texts[1]))
    if lines:
        columns = ("variant", "measured", "predicted", "prediction error", "by wall clock")
        made.append(Table(f"density at which {DENSE} becomes faster", columns, tuple(lines)))
    return made


def _speedup_table(group: Group) -> Table:
    unmentioned = (0.0, "early", "none", "passes", "", None)
    facts = {name: str(value) for name, value in group.facts.items() if value not in unmentioned}
    heading = ", ".join(f"{name} {value}" for name, value in facts.items())
    columns = [{point.density: f"{point.speedups[0]:.2f}x" for point in line} for line in group.lines.values()]
    densities = sorted({density for column in columns for density in column})
    lines = tuple((_percent(density), *(column.get(density, "-") for column in columns)) for density in densities)
    return Table(heading, ("density", *group.lines), lines, facts)


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
    lines = tuple(
        Series(variant, tuple((100 * point.density, point.speedups[clock]) for point in line), clock == 1)
        for variant, line in group.lines.items()
        for clock in (0, 1)
    )
    marks = tuple(
        VerticalLine(end.variant, 100 * density, dotted)
        for end in crossovers(group)
        for density, dotted in ((end.measured, False), (end.predicted, True))
        if density is not None
    )
    size = "{table_rows} x {width}, {dp_size} ranks, {distribution}".format(**group.facts)
    return Panel(size + group.suffix, lines, marks)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.3g}%"
