"""Study `overlap`: which variant to choose at which length, and how far each is from the plain one and from products.

A row is compared with `block_tp` of the same problem, kind of machine and software, both with a CUDA graph or both
without, and both compiled or neither. The newest row of a cell counts. Rows of stacks and rows that aren't measurements
are left out, rows of a former variant that ran as another one, and other ways for NCCL.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import pandas as pd

from tpbench.measure.clocks import CHAINED, DEVICE, TIMED, WALL
from tpbench.tables import MISSING, Table, TableCell, value_item
from tpbench.workloads.study_data import Picture, Speedups, oldest_first
from tpbench.workloads.tp_block.workload import PLAIN, traits_of

PARTS = ("column", "row", "mlp", "block")
CLOCKS = {clock.column: clock.title.lower() for clock in (CHAINED, DEVICE, WALL)}
"""The clocks. The first one that rows have decides where overlap pays: a training loop has no barrier after a block."""
INTERVALS = {clock.column: clock.interval for clock in TIMED}
"""By clock: the columns of the interval of its median."""
PRODUCTS = {
    "step": {"device_ms": ("exposed_ms", "compute_ms"), "chained_ms": ("chained_exposed_ms", "chained_compute_ms")},
    "forward pass": {
        "device_ms": ("forward_exposed_ms", "forward_compute_ms"),
        "chained_ms": ("chained_forward_exposed_ms", "chained_forward_compute_ms"),
    },
}
"""By clock: the columns of the time beyond that of the products alone, and of that time, measured in pairs."""
PAYS = 1.01
"""Least speed-up that counts as a gain: noise is smaller."""
GROUP = (
    "part", "hidden", "tp_size", "graph", "compile", "hardware", "torch_version", "dtype", "ffn", "heads", "kv_heads",
    "save_gathered",
)  # fmt: skip
"""Columns that must agree for times to be compared over tokens."""
BESIDE = (*INTERVALS.values(), *(names for clocks in PRODUCTS.values() for names in clocks.values()))
SHOWN = (*CLOCKS, *(name for names in BESIDE for name in names), "hidden_share", "bound", "host")


def problems(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Speedups, Any]]:
    """Yield the speed-ups of each problem over tokens, and its cells, whose columns are (name of `SHOWN`, variant)."""
    cells = []
    for row in filter(_is_compared, oldest_first(rows)):
        compiled = bool(row.get("compile")) or traits_of(row["variant"]).is_compiled
        cells.append({**row, "hardware": row["gpu_name"] or "cpu", "graph": bool(row["graph"]), "compile": compiled})
    frame = pd.DataFrame(cells, columns=[*GROUP, "variant", "tokens", *SHOWN])
    frame = frame.drop_duplicates([*GROUP, "variant", "tokens"], keep="last")
    frame["part"] = pd.Categorical(frame["part"], PARTS)
    for key, group in frame.groupby(list(GROUP), observed=True, dropna=False):
        table = group.pivot(index="tokens", columns="variant", values=[*SHOWN])
        speedups = Speedups.over(PLAIN, table[[*CLOCKS]].astype(float), dict(zip(GROUP, key, strict=True)))
        if speedups.axis:
            yield speedups, table


def _is_compared(row: Mapping[str, Any]) -> bool:
    shared_block = not row.get("layers") and traits_of(row["variant"]).shares_block
    usual = row.get("nccl") in (None, "default")
    return bool(row["warmed_up"] is not False and usual and shared_block and not row.get("chosen"))


def choice(speedups: Speedups, cells: Any, clock: str) -> dict[int, str]:
    """Return the variant to choose at each length by this clock: the fastest one, or the plain one if none pays.

    A gain counts if the intervals of both times are apart. The variant of the length before stays if it loses less than
    what pays.
    """
    chosen: dict[int, str] = {}
    low, high = INTERVALS[clock]
    ratios = speedups.by_clock[clock]
    sure = cells[high].lt(cells[low][PLAIN], axis="index").reindex_like(ratios)
    ratios = ratios.mask(~sure & (ratios > 1), 1.0)
    name = PLAIN
    for tokens, of_variants in ratios.dropna(how="all").iterrows():
        fastest = str(of_variants.idxmax())
        if of_variants[fastest] < PAYS:
            name = PLAIN
        elif name == PLAIN or not of_variants[name] * PAYS >= of_variants[fastest]:  # nor if it was not measured
            name = fastest
        chosen[int(str(tokens))] = name
    return chosen


def answer(speedups: Speedups, cells: Any) -> str:
    """Return the sentence for a user: which variant at which length, what it hides, what bounds it, if hosts differ."""
    by_text: dict[str, str] = {}
    for clock in speedups.by_clock:
        chosen = choice(speedups, cells, clock)
        runs = [(name, [*lengths]) for name, lengths in groupby(chosen, key=chosen.get)]
        texts = (f"{name} {'from' if run[1:] else 'at'} {run[0]} tokens" for name, run in runs)
        by_text.setdefault(", ".join(texts), CLOCKS[clock])
    first, ratios = next(iter(speedups.by_clock.items()))
    tokens, name = [*choice(speedups, cells, first).items()][-1]
    hidden, bound = (cells.loc[tokens, (column, name)] for column in ("hidden_share", "bound"))
    facts = [f"is {ratios[name][tokens]:.2f}x as fast as {PLAIN}"] if name != PLAIN else []
    if name != PLAIN and pd.notna(hidden):  # at the power limit a step can be faster than its products alone
        takes = "takes no longer than its products alone"
        facts.append(takes if hidden >= 1 else f"hides {hidden:.0%} of the communication")
    facts += [f"is bound by {bound}"] if pd.notna(bound) else []
    choices = "; ".join(f"by {clock} {text}" for text, clock in by_text.items())
    end = f"; at {tokens} tokens {name} {' and '.join(facts)}" if facts else ""
    hosts = cells["host"].stack().nunique()
    end += f"; these are rows of {hosts} hosts, whose times may differ" if hosts > 1 else ""
    return f"{_title(speedups)}, {speedups.facts['hardware']}: choose {choices}{end}"


def tables(rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Return the answers, and for each problem its speed-ups and its times over those of the products alone.

    Of a linear alone, the forward pass is an all-gather with its product, or a product with its reduce-scatter.
    """
    answers, made = [], []
    for speedups, cells in problems(rows):
        answers.append(answer(speedups, cells))
        made.append(_table(f"speed-up over {PLAIN}", speedups, speedups.by_clock, "{:.2f}x"))
        for what, clocks in PRODUCTS.items():
            over = _over_products(cells, clocks)
            if over and (what == "step" or speedups.facts["part"] in ("column", "row")):
                made.append(_table(f"{what} over its products alone", speedups, over, "{:.3f}x"))
    heading = (
        f"which variant to choose: {PLAIN} unless another one gains 1%, and the intervals of their times are apart"
    )
    return [Table(heading, notes=answers), *made] if made else []


def _over_products(cells: Any, clocks: Mapping[str, tuple[str, str]]) -> dict[str, pd.DataFrame]:
    """Return the times over those of the products alone, by clock. `clocks`: a value of `PRODUCTS`."""
    return {
        clock if cells[clock].notna().any(axis=None) else "time_ms": 1 + cells[more].astype(float) / cells[alone]
        for clock, (more, alone) in clocks.items()
        if cells[more].notna().any(axis=None)
    }


def picture(rows: Sequence[Mapping[str, Any]]) -> Picture | None:
    """Return the speed-ups by tokens, a panel for each problem, or None if no problem has two lengths.

    Lengths at which overlap doesn't pay, by the first clock, are shaded.
    """
    panels, lengths = [], set[float]()
    for speedups, cells in problems(rows):
        chosen = choice(speedups, cells, first := next(iter(speedups.by_clock)))
        losing = max((tokens for tokens, name in chosen.items() if name == PLAIN), default=0)
        if len(speedups.axis) > 1:
            clocks = {clock: ratios for clock, ratios in speedups.by_clock.items() if clock in (first, WALL.column)}
            panel = replace(speedups, by_clock=clocks).panel(_title(speedups))
            paying = next((tokens for tokens in chosen if tokens > losing), 2 * losing)
            panels.append(replace(panel, no_gain_to=paying if losing else 0))
            lengths |= {*speedups.axis}
    labels = "tokens; dashed: wall time; shaded: no gain", f"speed-up over {PLAIN}"
    return Picture(tuple(panels), *labels, doubling=tuple(sorted(lengths))) if panels else None


def _title(speedups: Speedups) -> str:
    facts = speedups.facts
    unusual = [f", {name}=true" for name in ("graph", "compile") if facts[name]]
    unusual += [] if facts["save_gathered"] else [", save_gathered=false"]
    return "part={part}, hidden={hidden}, ffn={ffn}, tp={tp_size}".format(**facts) + "".join(unusual)


def _table(what: str, speedups: Speedups, by_clock: Mapping[str, pd.DataFrame], form: str) -> Table:
    names = sorted({str(name) for ratios in by_clock.values() for name in ratios})
    frames = [ratios.reindex(speedups.axis, columns=names).to_numpy().tolist() for ratios in by_clock.values()]
    lines = [
        [
            TableCell(str(tokens), value_item(tokens)),
            *(_cell(ratios, [*by_clock], form) for ratios in zip(*of_clocks, strict=True)),
        ]
        for tokens, *of_clocks in zip(speedups.axis, *frames, strict=True)
    ]
    first, *others = (f"by {CLOCKS[clock]}" for clock in by_clock)
    clocks = f"{first} ({', '.join(others)})" if others else first
    facts = {"ratio": f"{what} {clocks}"} | {name: value_item(value) for name, value in speedups.facts.items()}
    return Table(f"{facts['ratio']}, {_title(speedups)}, {facts['hardware']}", ("tokens", *names), lines, facts)


def _cell(ratios: Sequence[float], clocks: Sequence[str], form: str) -> TableCell:
    """Return the ratio by the first clock, with those by the others in its text and its note."""
    first, *others = (MISSING if math.isnan(ratio) else form.format(ratio) for ratio in ratios)
    text = first if set(others) <= {MISSING} else f"{first} ({', '.join(others)})"
    notes = (f"{clock} {other}" for clock, other in zip(clocks[1:], others, strict=True) if other != MISSING)
    return TableCell(text, None if math.isnan(ratios[0]) else ratios[0], note=", ".join(notes))
