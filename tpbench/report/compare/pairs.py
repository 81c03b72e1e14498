"""Pairs of the same cell in two sets of rows."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import pandas as pd

from tpbench.report.analysis.records import (
    Record,
    column_label,
    comparable,
    problem_fields,
    problem_identity,
    value_text,
)
from tpbench.report.compare.conditions import repeats
from tpbench.results.current_rows import hardware, replaced_rows
from tpbench.results.read import plain_rows
from tpbench.workloads import workloads

CellIdentity: TypeAlias = tuple[tuple[str, Any], ...]

_ALWAYS = ("workload", "variant", "device", "graph", "fresh", "nodes", "tp_size", "dp_size")


@dataclass(frozen=True)
class CellPair:
    """One cell in both sets, or in one of them."""

    name: str
    identity: CellIdentity
    before_rows: tuple[Record, ...]
    after_rows: tuple[Record, ...]
    """The newest row of the cell, and before it the rows that repeat it. Empty if the set has no such cell."""

    @property
    def before(self) -> Record | None:
        """The newest row of the first set."""
        return self.before_rows[-1] if self.before_rows else None

    @property
    def after(self) -> Record | None:
        """The newest row of the second set."""
        return self.after_rows[-1] if self.after_rows else None


def pair_cells(before: pd.DataFrame, after: pd.DataFrame) -> list[CellPair]:
    """Pair the rows of each cell with those of the other set, on the same hardware if possible."""
    old, new = _by_identity(before), _by_identity(after)
    names = cell_names([*old, *new])
    pairs = []
    for cell in dict.fromkeys([*new, *old]):
        left, right = dict(old.get(cell, {})), dict(new.get(cell, {}))
        sides = [(left.pop(machine), right.pop(machine)) for machine in [*right] if machine in left]
        while left and right:
            sides.append((left.pop(next(iter(left))), right.pop(next(iter(right)))))
        sides += [(rows, ()) for rows in left.values()] + [((), rows) for rows in right.values()]
        pairs += [CellPair(names[cell], cell, *side) for side in sides]
    return pairs


def lost_cells(pairs: Iterable[CellPair]) -> list[str]:
    """Return the names of the cells that were measured before and have no row after.

    Cells of hardware that the second set has no row of do not count: its sweep ran elsewhere.
    """
    pairs = list(pairs)
    machines = {pair.after["hardware"] for pair in pairs if pair.after}
    return [
        pair.name
        for pair in pairs
        if pair.before and not pair.after and pair.before["status"] == "ok" and pair.before["hardware"] in machines
    ]


def _by_identity(frame: pd.DataFrame) -> dict[CellIdentity, dict[Any, tuple[Record, ...]]]:
    """Return the newest row by cell and hardware, after the rows that it repeats."""
    return {
        cell: {machine: tuple(row for row in rows if repeats(row, rows[-1])) for machine, rows in machines.items()}
        for cell, machines in rows_by_cell(frame).items()
    }


def rows_by_cell(frame: pd.DataFrame) -> dict[CellIdentity, dict[Any, list[Record]]]:
    """Return the rows of each cell by hardware, oldest first. Failures beside a measurement are left out."""
    frame = comparable(frame)
    frame = frame.drop(replaced_rows(frame))
    frame = frame.assign(hardware=hardware(frame)["hardware"], when=frame["finished_at"].fillna(frame["started_at"]))
    frame = frame.sort_values("when", kind="stable", na_position="first")
    cells: dict[CellIdentity, dict[Any, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in plain_rows(frame):
        cells[_identity(record)][record["hardware"]].append(record)
    return cells


def _identity(record: Record) -> CellIdentity:
    """Return the whole problem of a cell, options included. It does not depend on the defaults of the configuration."""
    workload = workloads().get(record["workload"])
    names: dict[str, Any] = dict.fromkeys(_ALWAYS)
    names |= (
        (problem_fields(workload) | problem_identity(workload))
        if workload
        else dict.fromkeys(("loss", "dtype", "vocab", "tokens"))
    )
    names |= {"dp_size": 1, "nodes": 1, "graph": False, "fresh": False}
    values = {name: default if record.get(name) is None else record[name] for name, default in names.items()}
    return tuple((name, str(value) if name == "block_cap" else _hashable(value)) for name, value in values.items())


def _hashable(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool, type(None))) else json.dumps(value, default=str)


def cell_names(cells: Iterable[CellIdentity]) -> dict[CellIdentity, str]:
    """Return the name of each cell: its variant, and the fields in which cells differ."""
    cells = list(cells)
    seen: dict[str, set[Any]] = defaultdict(set)
    for cell in cells:
        for name, value in cell:
            seen[name].add(value)
    always = {"vocab", "tp_size"}
    defaults = {option for workload in workloads().values() for option in workload.option_defaults.items()}
    first = ("workload", "loss", "dtype", "tokens", "vocab", "tp_size")
    names = {}
    for cell in cells:
        parts = [
            f"{column_label(name)}={value_text(value)}"
            for name, value in sorted(cell, key=lambda item: first.index(item[0]) if item[0] in first else len(first))
            if name != "variant"
            and value is not None
            and (name, value) not in defaults
            and (name in always or len(seen[name]) > 1)
        ]
        names[cell] = " ".join([value_text(dict(cell)["variant"]), *parts])
    return names
