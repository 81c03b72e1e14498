"""Study `overlap`: speed-ups of overlapped variants over the plain one by tokens, and where overlap stops paying.

A row is compared with `block_tp` of the same problem, machine and software, both with a CUDA graph or both without.
The newest row of a cell counts. Rows of stacks and rows that are no measurement are left out, and rows of `block_auto`
whose passes may be graphs, because then they gain from these too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tpbench.tables import Table
from tpbench.workloads.study_data import Panel, Picture, Series, oldest_first

PLAIN, WHOLE = "block_tp", "block_no_tp"
PARTS = ("column", "row", "mlp", "block")
GROUP = ("hardware", "torch_version", "dtype", "part", "hidden", "ffn", "heads", "kv_heads", "tp_size", "graph")
"""Columns that must agree for times to be compared over tokens."""
CLOCKS = {"time_ms": "wall time", "device_ms": "device time"}
PAYS = 1.01
"""Least speed-up that counts as a gain: noise is smaller."""

Row: TypeAlias = Mapping[str, Any]
GroupKey: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True)
class Speedup:
    """The plain time over that of an overlapped variant."""

    group: GroupKey
    """Values of the columns of `GROUP`."""
    variant: str
    tokens: int
    by_clock: Mapping[str, float]
    """By the name of the time's column."""


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return a table of speed-ups for each group, and one of the lengths from which overlap pays."""
    found = speedups(rows)
    made = [_speedup_table(group, each) for group, each in _by_group(found).items()]
    lines = [(*_names(group), *_pays_from(each)) for group, each in _by_group(found).items()]
    if lines:
        columns = ("part", "hidden", "tp", "graph", *(f"pays by {name} from" for name in CLOCKS.values()))
        heading = f"tokens from which some overlapped variant beats {PLAIN}, at every longer measured length too"
        made.append(Table(heading, columns, tuple(lines)))
    return made


def picture(rows: Sequence[Row]) -> Picture | None:
    """Return the speed-ups by tokens, a panel for each group, or None if no group has two lengths."""
    groups = {
        group: found for group, found in _by_group(speedups(rows)).items() if len({each.tokens for each in found}) > 1
    }
    if not groups:
        return None
    lengths = sorted({each.tokens for found in groups.values() for each in found})
    panels = tuple(_panel(group, found) for group, found in groups.items())
    return Picture(panels, "tokens; dashed: by wall time", f"speed-up over {PLAIN}", doubling=tuple(lengths))


def speedups(rows: Sequence[Row]) -> list[Speedup]:
    """Return the speed-ups of all overlapped variants, in the order of parts, sizes, variants and tokens."""
    newest: dict[tuple[Any, ...], Row] = {}
    for row in oldest_first(rows):
        measured = row["status"] == "ok" and not row["interpreted"] and row["warmed_up"] is not False
        one_block = not row.get("layers") and row["variant"] != WHOLE
        own_graphs = row.get("try_graphs") and not row["graph"]
        if measured and row["save_gathered"] and one_block and not own_graphs:
            newest[_group_of(row), row["variant"], row["tokens"]] = row
    found = []
    for (group, variant, tokens), row in newest.items():
        plain = newest.get((group, PLAIN, tokens))
        if plain is not None and variant != PLAIN:
            ratios = {name: plain[name] / row[name] for name in CLOCKS if plain[name] and row[name]}
            found.append(Speedup(group, str(variant), int(tokens), ratios))
    return sorted(found, key=_order)


def pays_from(members: Iterable[Speedup], clock: str) -> int | None:
    """Return the least number of tokens from which on the best variant pays at every measured length, or None."""
    best: dict[int, float] = defaultdict(float)
    for each in members:
        best[each.tokens] = max(best[each.tokens], each.by_clock.get(clock, 0.0))
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
        lengths = [each.tokens for each in members if clock in each.by_clock]
        tokens = pays_from(members, clock)
        texts.append("-" if not lengths else f"not up to {max(lengths)}" if tokens is None else str(tokens))
    return texts


def _speedup_table(group: GroupKey, members: Sequence[Speedup]) -> Table:
    variants = list(dict.fromkeys(each.variant for each in members))
    cells = {(each.tokens, each.variant): each.by_clock for each in members}
    lines = [
        (str(tokens), *(_ratios(cells.get((tokens, variant), {})) for variant in variants))
        for tokens in sorted({each.tokens for each in members})
    ]
    facts = dict(zip(GROUP, map(str, group), strict=True))
    heading = f"speed-up over {PLAIN} by wall time (by device time), {_title(group)}, {facts['hardware']}"
    return Table(heading, ("tokens", *variants), tuple(lines), facts)


def _panel(group: GroupKey, members: Iterable[Speedup]) -> Panel:
    points: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for each in members:
        for clock, ratio in each.by_clock.items():
            points[each.variant, clock].append((each.tokens, ratio))
    lines = [Series(variant, tuple(line), clock == "time_ms") for (variant, clock), line in points.items()]
    return Panel(_title(group), tuple(lines))


def _title(group: GroupKey) -> str:
    part, hidden, ranks, graph = _names(group)
    return f"part={part}, hidden={hidden}, tp={ranks}{', graph=true' if graph == 'true' else ''}"


def _names(group: GroupKey) -> tuple[str, str, str, str]:
    facts = dict(zip(GROUP, group, strict=True))
    return str(facts["part"]), str(facts["hidden"]), str(facts["tp_size"]), str(bool(facts["graph"])).lower()


def _by_group(members: Iterable[Speedup]) -> dict[GroupKey, list[Speedup]]:
    groups: dict[GroupKey, list[Speedup]] = defaultdict(list)
    for each in members:
        groups[each.group].append(each)
    return groups


def _group_of(row: Row) -> GroupKey:
    hardware = f"{row['gpu_name'] or 'cpu'}"
    return (hardware, *(row[name] for name in GROUP[1:-1]), bool(row["graph"]))


def _order(speedup: Speedup) -> tuple[Any, ...]:
    facts = dict(zip(GROUP, speedup.group, strict=True))
    part = PARTS.index(facts["part"]) if facts["part"] in PARTS else len(PARTS)
    sizes = (facts["hidden"], facts["tp_size"], facts["graph"])
    return (part, sizes, tuple(map(str, speedup.group)), speedup.variant, speedup.tokens)


def _ratios(by_clock: Mapping[str, float]) -> str:
    wall, device = (f"{by_clock[name]:.2f}x" if name in by_clock else "" for name in CLOCKS)
    return f"{wall} ({device})" if device else wall or "-"
