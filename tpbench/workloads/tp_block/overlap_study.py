"""Study `overlap`: speed-ups of overlapped variants over the plain one by tokens, and where overlap stops paying.

A row is compared with `block_tp` of the same problem, machine and software, both with a CUDA graph or both without.
The newest row of a cell counts. Rows of stacks and rows that are no measurement are left out, and rows of `block_auto`
whose passes may be graphs, because then they gain from these too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from tpbench.tables import Table
from tpbench.workloads.study_data import Panel, Picture, Series, oldest_first

PLAIN, WHOLE = "block_tp", "block_no_tp"
PARTS = ("column", "row", "mlp", "block")
CLOCKS = {"time_ms": "wall time", "device_ms": "device time"}
PAYS = 1.01
"""Least speed-up that counts as a gain: noise is smaller."""

Row: TypeAlias = Mapping[str, Any]


class Group(NamedTuple):
    """What must agree for times to be compared over tokens."""

    part: str
    hidden: int
    tp_size: int
    graph: bool
    hardware: str
    torch_version: str
    dtype: str
    ffn: int
    heads: int
    kv_heads: int

    @classmethod
    def of(cls, row: Row) -> Group:
        """Return the group of a row."""
        same = {name: row[name] for name in cls._fields if name not in ("hardware", "graph")}
        return cls(hardware=row["gpu_name"] or "cpu", graph=bool(row["graph"]), **same)

    @property
    def title(self) -> str:
        """The part and the sizes."""
        return f"part={self.part}, hidden={self.hidden}, tp={self.tp_size}{', graph=true' if self.graph else ''}"


Ratios: TypeAlias = dict[tuple[str, int], dict[str, float]]
"""The plain time over that of an overlapped variant: by variant and tokens, and by the name of the time's column."""


def speedups(rows: Sequence[Row]) -> dict[Group, Ratios]:
    """Return the speed-ups of all overlapped variants by group, in the order of parts, sizes, variants and tokens."""
    newest: dict[tuple[Group, str, int], Row] = {}
    for row in oldest_first(rows):
        measured = row["status"] == "ok" and not row["interpreted"] and row["warmed_up"] is not False
        one_block = not row.get("layers") and row["variant"] != WHOLE
        own_graphs = row.get("try_graphs") and not row["graph"]
        if measured and row["save_gathered"] and one_block and not own_graphs:
            newest[Group.of(row), str(row["variant"]), int(row["tokens"])] = row
    result: dict[Group, Ratios] = defaultdict(dict)
    for group, variant, tokens in sorted(newest, key=lambda cell: (PARTS.index(cell[0].part), *cell)):
        row, plain = newest[group, variant, tokens], newest.get((group, PLAIN, tokens))
        if plain is not None and variant != PLAIN:
            by_clock = {name: plain[name] / row[name] for name in CLOCKS if plain[name] and row[name]}
            result[group][variant, tokens] = by_clock
    return result


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return a table of speed-ups for each group, and one of the lengths from which overlap pays."""
    groups = speedups(rows)
    if not groups:
        return []
    lines = [
        (group.part, str(group.hidden), str(group.tp_size), str(group.graph).lower(), *_pays_from(ratios))
        for group, ratios in groups.items()
    ]
    columns = ("part", "hidden", "tp", "graph", *(f"pays by {name} from" for name in CLOCKS.values()))
    heading = f"tokens from which some overlapped variant beats {PLAIN}, at every longer measured length too"
    return [*(_speedup_table(*group) for group in groups.items()), Table(heading, columns, tuple(lines))]


def picture(rows: Sequence[Row]) -> Picture | None:
    """Return the speed-ups by tokens, a panel for each group, or None if no group has two lengths."""
    groups = {group: ratios for group, ratios in speedups(rows).items() if len(_lengths(ratios)) > 1}
    if not groups:
        return None
    panels = tuple(_panel(group, ratios) for group, ratios in groups.items())
    lengths = _lengths(cell for ratios in groups.values() for cell in ratios)
    return Picture(panels, "tokens; dashed: by wall time", f"speed-up over {PLAIN}", doubling=tuple(lengths))


def _lengths(cells: Iterable[tuple[str, int]]) -> list[int]:
    return sorted({tokens for _, tokens in cells})


def pays_from(ratios: Ratios, clock: str) -> int | None:
    """Return the least number of tokens from which on the best variant pays at every measured length, or None."""
    best: dict[int, float] = defaultdict(float)
    for (_, tokens), by_clock in ratios.items():
        best[tokens] = max(best[tokens], by_clock.get(clock, 0.0))
    least = None
    for tokens in sorted(best, reverse=True):
        if best[tokens] < PAYS:
            break
        least = tokens
    return least


def _pays_from(ratios: Ratios) -> list[str]:
    """Return the text of `pays_from` for each clock, or "-" for a clock that no row has."""
    texts = []
    for clock in CLOCKS:
        lengths = _lengths(cell for cell, by_clock in ratios.items() if clock in by_clock)
        tokens = pays_from(ratios, clock)
        texts.append("-" if not lengths else f"not up to {lengths[-1]}" if tokens is None else str(tokens))
    return texts


def _speedup_table(group: Group, ratios: Ratios) -> Table:
    variants = list(dict.fromkeys(variant for variant, _ in ratios))
    lines = [
        (str(tokens), *(_text(ratios.get((variant, tokens), {})) for variant in variants))
        for tokens in _lengths(ratios)
    ]
    facts = {name: str(value) for name, value in group._asdict().items()}
    heading = f"speed-up over {PLAIN} by wall time (by device time), {group.title}, {group.hardware}"
    return Table(heading, ("tokens", *variants), tuple(lines), facts)


def _text(by_clock: Mapping[str, float] | None) -> str:
    by_clock = by_clock or {}
    wall, device = (f"{by_clock[name]:.2f}x" if name in by_clock else "" for name in CLOCKS)
    return f"{wall} ({device})" if device else wall or "-"


def _panel(group: Group, ratios: Ratios) -> Panel:
    points: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for (variant, tokens), by_clock in ratios.items():
        for clock, ratio in by_clock.items():
            points[variant, clock].append((tokens, ratio))
    lines = [Series(variant, tuple(line), clock == "time_ms") for (variant, clock), line in points.items()]
    return Panel(group.title, tuple(lines))
