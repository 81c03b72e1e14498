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

    hardware: str
    torch_version: str
    dtype: str
    part: str
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    tp_size: int
    graph: bool

    @classmethod
    def of(cls, row: Row) -> Group:
        """Return the group of a row."""
        same = {name: row[name] for name in cls._fields if name not in ("hardware", "graph")}
        return cls(hardware=row["gpu_name"] or "cpu", graph=bool(row["graph"]), **same)

    @property
    def title(self) -> str:
        """The part and the sizes."""
        return f"part={self.part}, hidden={self.hidden}, tp={self.tp_size}{', graph=true' if self.graph else ''}"


class Speedup(NamedTuple):
    """The plain time over that of an overlapped variant."""

    group: Group
    variant: str
    tokens: int
    by_clock: Mapping[str, float]
    """By the name of the time's column."""


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return a table of speed-ups for each group, and one of the lengths from which overlap pays."""
    groups = _by_group(speedups(rows))
    if not groups:
        return []
    lines = [
        (group.part, str(group.hidden), str(group.tp_size), str(group.graph).lower(), *_pays_from(members))
        for group, members in groups.items()
    ]
    columns = ("part", "hidden", "tp", "graph", *(f"pays by {name} from" for name in CLOCKS.values()))
    heading = f"tokens from which some overlapped variant beats {PLAIN}, at every longer measured length too"
    return [*(_speedup_table(*group) for group in groups.items()), Table(heading, columns, tuple(lines))]


def picture(rows: Sequence[Row]) -> Picture | None:
    """Return the speed-ups by tokens, a panel for each group, or None if no group has two lengths."""
    groups = {group: members for group, members in _by_group(speedups(rows)).items() if len(_lengths(members)) > 1}
    if not groups:
        return None
    panels = tuple(_panel(group, members) for group, members in groups.items())
    lengths = _lengths(speedup for members in groups.values() for speedup in members)
    return Picture(panels, "tokens; dashed: by wall time", f"speed-up over {PLAIN}", doubling=tuple(lengths))


def speedups(rows: Sequence[Row]) -> list[Speedup]:
    """Return the speed-ups of all overlapped variants, in the order of parts, sizes, variants and tokens."""
    newest: dict[tuple[Group, str, int], Row] = {}
    for row in oldest_first(rows):
        measured = row["status"] == "ok" and not row["interpreted"] and row["warmed_up"] is not False
        one_block = not row.get("layers") and row["variant"] != WHOLE
        own_graphs = row.get("try_graphs") and not row["graph"]
        if measured and row["save_gathered"] and one_block and not own_graphs:
            newest[Group.of(row), str(row["variant"]), int(row["tokens"])] = row
    result = []
    for (group, variant, tokens), row in newest.items():
        plain = newest.get((group, PLAIN, tokens))
        if plain is not None and variant != PLAIN:
            ratios = {name: plain[name] / row[name] for name in CLOCKS if plain[name] and row[name]}
            result.append(Speedup(group, variant, tokens, ratios))
    return sorted(result, key=_order)


def _order(speedup: Speedup) -> tuple[Any, ...]:
    group = speedup.group
    part = PARTS.index(group.part) if group.part in PARTS else len(PARTS)
    sizes = (group.hidden, group.tp_size, group.graph)
    return (part, sizes, tuple(map(str, group)), speedup.variant, speedup.tokens)


def _lengths(members: Iterable[Speedup]) -> list[int]:
    return sorted({speedup.tokens for speedup in members})


def _by_group(members: Iterable[Speedup]) -> dict[Group, list[Speedup]]:
    groups: dict[Group, list[Speedup]] = defaultdict(list)
    for speedup in members:
        groups[speedup.group].append(speedup)
    return groups


def pays_from(members: Iterable[Speedup], clock: str) -> int | None:
    """Return the least number of tokens from which on the best variant pays at every measured length, or None."""
    best: dict[int, float] = defaultdict(float)
    for speedup in members:
        best[speedup.tokens] = max(best[speedup.tokens], speedup.by_clock.get(clock, 0.0))
    least = None
    for tokens in sorted(best, reverse=True):
        if best[tokens] < PAYS:
            break
        least = tokens
    return least


def _pays_from(members: Sequence[Speedup]) -> list[str]:
    """Return the text of `pays_from` for each clock, or "-" for a clock that no row has."""
    texts = []
    for clock in CLOCKS:
        lengths = [speedup.tokens for speedup in members if clock in speedup.by_clock]
        tokens = pays_from(members, clock)
        texts.append("-" if not lengths else f"not up to {max(lengths)}" if tokens is None else str(tokens))
    return texts


def _speedup_table(group: Group, members: Sequence[Speedup]) -> Table:
    variants = list(dict.fromkeys(speedup.variant for speedup in members))
    cells = {(speedup.tokens, speedup.variant): speedup.by_clock for speedup in members}
    lines = [
        (str(tokens), *(_ratios(cells.get((tokens, variant), {})) for variant in variants))
        for tokens in _lengths(members)
    ]
    facts = {name: str(value) for name, value in group._asdict().items()}
    heading = f"speed-up over {PLAIN} by wall time (by device time), {group.title}, {group.hardware}"
    return Table(heading, ("tokens", *variants), tuple(lines), facts)


def _ratios(by_clock: Mapping[str, float]) -> str:
    wall, device = (f"{by_clock[name]:.2f}x" if name in by_clock else "" for name in CLOCKS)
    return f"{wall} ({device})" if device else wall or "-"


def _panel(group: Group, members: Iterable[Speedup]) -> Panel:
    points: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for speedup in members:
        for clock, ratio in speedup.by_clock.items():
            points[speedup.variant, clock].append((speedup.tokens, ratio))
    lines = [Series(variant, tuple(line), clock == "time_ms") for (variant, clock), line in points.items()]
    return Panel(group.title, tuple(lines))
