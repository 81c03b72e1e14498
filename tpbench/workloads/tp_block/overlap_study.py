"""Study `overlap`: speed-ups of overlapped variants over the plain one by tokens, and where overlap stops paying.

A row is compared with `block_tp` of the same problem, machine and software, both with a CUDA graph or both without.
The newest row of a cell counts. Rows of stacks and rows that aren't measurements are left out, and rows of `block_auto`
whose passes may be graphs, because then they gain from these too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from tpbench.settings import spelled
from tpbench.tables import Table
from tpbench.workloads.study_data import Picture, Speedups, oldest_first

PLAIN, WHOLE = "block_tp", "block_no_tp"
PARTS = ("column", "row", "mlp", "block")
CLOCKS = {"time_ms": "wall time", "device_ms": "device time"}
PAYS = 1.01
"""Least speed-up that counts as a gain: noise is smaller."""
GROUP = ("part", "hidden", "tp_size", "graph", "hardware", "torch_version", "dtype", "ffn", "heads", "kv_heads")
"""Columns that must agree for times to be compared over tokens."""


def speedups(rows: Sequence[Mapping[str, Any]]) -> list[Speedups]:
    """Return the speed-ups of all overlapped variants over tokens, in the order of parts and sizes."""
    cells = [
        {**row, "hardware": row["gpu_name"] or "cpu", "graph": bool(row["graph"])}
        for row in oldest_first(rows)
        if _is_compared(row)
    ]
    frame = pd.DataFrame(cells, columns=[*GROUP, "variant", "tokens", *CLOCKS])
    frame = frame.drop_duplicates([*GROUP, "variant", "tokens"], keep="last")
    frame["part"] = pd.Categorical(frame["part"], PARTS)
    groups = []
    for key, group in frame.groupby(list(GROUP), observed=True, dropna=False):
        times = group.pivot(index="tokens", columns="variant", values=list(CLOCKS)).astype(float)
        groups.append(Speedups.over(PLAIN, times, dict(zip(GROUP, key, strict=True))))
    return [group for group in groups if group.axis]


def _is_compared(row: Mapping[str, Any]) -> bool:
    measured = row["status"] == "ok" and not row["interpreted"] and row["warmed_up"] is not False
    one_block = not row.get("layers") and row["variant"] != WHOLE
    own_graphs = row.get("try_graphs") and not row["graph"]
    return bool(measured and row["save_gathered"] and one_block and not own_graphs)


def tables(rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Return a table of speed-ups for each group, and one of the lengths from which overlap pays."""
    groups = speedups(rows)
    lines = [
        (*(spelled(group.facts[name]) for name in GROUP[:4]), *(pays_from(group, clock) for clock in CLOCKS))
        for group in groups
    ]
    columns = ("part", "hidden", "tp", "graph", *(f"pays by {name} from" for name in CLOCKS.values()))
    heading = f"tokens from which some overlapped variant beats {PLAIN}, at every longer measured length too"
    return [*map(_speedup_table, groups), Table(heading, columns, lines)] if groups else []


def picture(rows: Sequence[Mapping[str, Any]]) -> Picture | None:
    """Return the speed-ups by tokens, a panel for each group, or None if no group has two lengths."""
    groups = [group for group in speedups(rows) if len(group.axis) > 1]
    lengths = sorted({tokens for group in groups for tokens in group.axis})
    panels = tuple(group.panel(_title(group)) for group in groups)
    labels = "tokens; dashed: by wall time", f"speed-up over {PLAIN}"
    return Picture(panels, *labels, doubling=tuple(lengths)) if panels else None


def pays_from(group: Speedups, clock: str) -> str:
    """Return the tokens from which on the best variant pays at every measured length. "-": no row has the clock."""
    if clock not in group.by_clock:
        return "-"
    gains = group.by_clock[clock].max(axis="columns")
    losing = gains.index[gains < PAYS]
    paying = gains.index[gains.index > losing[-1]] if len(losing) else gains.index
    return str(paying[0]) if len(paying) else f"not up to {gains.index[-1]}"


def _title(group: Speedups) -> str:
    return "part={part}, hidden={hidden}, tp={tp_size}".format(**group.facts) + ", graph=true" * group.facts["graph"]


def _speedup_table(group: Speedups) -> Table:
    def texts_by(clock: str) -> pd.DataFrame:
        ratios = group.by_clock.get(clock, pd.DataFrame()).reindex(group.axis, columns=group.names)
        return ratios.map(lambda ratio: "" if pd.isna(ratio) else f"{ratio:.2f}x")

    wall, device = map(texts_by, CLOCKS)
    texts = wall.where(device == "", wall + " (" + device + ")").replace("", "-")
    lines = [(str(tokens), *cells) for tokens, *cells in texts.itertuples(name=None)]
    facts = {name: str(value) for name, value in group.facts.items()}
    heading = f"speed-up over {PLAIN} by wall time (by device time), {_title(group)}, {group.facts['hardware']}"
    return Table(heading, ("tokens", *group.names), lines, facts)
