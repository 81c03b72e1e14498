"""Which rows are measurements of the same cell."""

from __future__ import annotations

import pandas as pd


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
    """The rows of `frame` that no newer row of the same cell replaces, in their order.

    A cell is a job on a kind of machine: same key, same device, same hardware. Two hosts with the same GPU are one
    cell, and so are two versions of tpbench, torch or the driver: the newest row is what holds now. A row without a
    key is a cell of its own.
    """
    cells = hardware(frame).fillna("")
    cells["key"] = frame["key"].fillna("row " + frame.index.to_series().astype(str))
    cells["when"] = frame["finished_at"].fillna(frame["started_at"])
    cells = cells.sort_values("when", kind="stable", na_position="first")
    return frame.loc[cells.drop_duplicates(["key", "device", "hardware"], keep="last").index.sort_values()]
