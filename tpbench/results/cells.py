"""Which rows are measurements of the same cell, and which of them says how it stands.

One rule for reports, `resume=true` and `collect.py`: what was measured stands until the same cell is measured again. A
row without a measurement, of a try that failed or was skipped, counts where nothing was measured as it would have been:
with the same kernels and packages, on the same hardware and driver. Be it older or newer, it says nothing beside one
that was.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import pandas as pd

from tpbench.results.plain import plain_rows

MEASURED = ("ok", "oom", "wrong")
"""Statuses of a cell that was run and judged."""

SOFTWARE = ("kernels_version", "torch_version", "triton_version")
HARDWARE = {"cuda": ("gpu_name", "driver_version"), "cpu": ("cpu_model",)}
"""By device. With the software and the resolved job (its key) this is what makes an old row stand for a cell."""


def changes(row: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """The columns in which that row was made otherwise than the facts say, as far as they do. Of the hardware it knows
    nothing if its job never got as far."""
    hardware = HARDWARE.get(str(row["device"] or facts.get("device")), ())
    named = [*SOFTWARE, *(name for name in hardware if row[name] is not None)]
    return [name for name in named if name in facts and row[name] != facts[name]]


def yields(row: Mapping[str, Any], to: Mapping[str, Any]) -> bool:
    """Whether the row measured nothing, and says nothing beside that other one of its cell: a measurement, or what came
    of a later try, made as it was made."""
    if row["status"] in MEASURED or row["key"] != to["key"]:
        return False
    earlier = None not in (row["finished_at"], to["finished_at"]) and row["finished_at"] < to["finished_at"]
    facts = {name: value for name, value in to.items() if value is not None}
    return (to["status"] in MEASURED or earlier) and not changes(row, facts)


def hardware(frame: pd.DataFrame) -> pd.DataFrame:
    """What each row was measured on: columns `device` and `hardware` (the GPU's name, on a CPU the CPU's).

    A cell that never ran may not say. It is taken to belong to the hardware of the other rows where they agree on
    one, so that a cell that was skipped stands beside those that were not, and a later run replaces it.
    """
    place = pd.DataFrame(
        {"device": frame["device"], "hardware": frame["gpu_name"].where(frame["device"] == "cuda", frame["cpu_model"])}
    )
    known = place.dropna().drop_duplicates()
    if len(known) == 1:
        place.loc[place["device"].isna(), "device"] = known["device"].iloc[0]
    for device, models in known.groupby("device")["hardware"]:
        if len(models) == 1:
            place.loc[(place["device"] == device) & place["hardware"].isna(), "hardware"] = models.iloc[0]
    return place


def newest(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of `frame` that no other row of the same cell replaces, in their order.

    A cell is a job on a kind of machine: same key, same device, same hardware. Two hosts with the same GPU are one
    cell, and so are two versions of tpbench, torch or the driver: the newest row is what holds now, but for rows that
    yield to a measurement. A row without a key is a cell of its own.
    """
    frame = frame.drop(yielding(frame))
    cells = hardware(frame).fillna("")
    cells["key"] = frame["key"].fillna("row " + frame.index.to_series().astype(str))
    cells["when"] = frame["finished_at"].fillna(frame["started_at"])
    cells = cells.sort_values("when", kind="stable", na_position="first")
    return frame.loc[cells.drop_duplicates(["key", "device", "hardware"], keep="last").index.sort_values()]


def yielding(frame: pd.DataFrame) -> list[Any]:
    """The index of rows that yield to one that was measured."""
    if "status" not in frame:
        return []
    measured = frame["status"].isin(MEASURED)
    contested = frame["key"].isin(frame.loc[~measured, "key"].dropna()) & frame["key"].isin(frame.loc[measured, "key"])
    names = ["key", "status", "device", "finished_at", *SOFTWARE, *(name for of in HARDWARE.values() for name in of)]
    rows = frame.loc[contested].reindex(columns=names)
    plain = plain_rows(rows)
    standing: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for each in plain:
        if each["status"] in MEASURED:
            standing[each["key"]].append(each)
    found = zip(rows.index, plain, strict=True)
    return [index for index, each in found if any(yields(each, to) for to in standing[each["key"]])]
