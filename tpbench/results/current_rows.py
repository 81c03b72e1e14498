"""Choose the row that holds for each cell, if several rows are of the same cell, and warn of rows that could mislead.

A measurement holds until the same cell is measured again. A row of an attempt that failed or was skipped holds only if
no measurement was made with the same kernels and packages on the same hardware and driver.
"""

import contextlib
import json
from collections.abc import Mapping
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from tpbench.suggestions import printable

MEASURED = ("ok", "oom", "wrong")
"""Statuses of a cell that ran to its end."""

SOFTWARE = ("kernels_version", "torch_version", "triton_version", "variant_version", "package_versions")
HARDWARE = {"cuda": ("gpu_name", "driver_version"), "cpu": ("cpu_model",)}
"""By device. An old row holds for a cell if its hardware, software and resolved job (its key) are the same."""

_MAY_LACK = ("package_versions", *(name for names in HARDWARE.values() for name in names))
"""Columns that a row may lack although its job ran with one value of them."""

_LONGER_WAIT, _WAIT_MS = 2.0, 0.1
"""The host may wait for the device for `_LONGER_WAIT` times the device time, and `_WAIT_MS` more. In 74 honest cells of
0.008 to 8 ms on one H200, with and without graphs, it waited at most 0.008 ms longer than the device time."""


def differing_columns(row: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """Return the columns of software and hardware in which the row differs from the facts.

    Columns that the facts lack are not compared, nor hardware that the row lacks because its job ended early.
    """
    hardware = HARDWARE.get(str(row["device"] or facts.get("device")), ())
    compared = [name for name in (*SOFTWARE, *hardware) if name in facts]
    return [name for name in compared if row[name] != facts[name] and not (name in _MAY_LACK and row[name] is None)]


def is_replaced_by(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return true if the other row replaces this one, which isn't a measurement.

    Both are of the same cell, with the same software and hardware. The other one is a measurement or is later.
    """
    if row["status"] in MEASURED or row["key"] != other["key"]:
        return False
    earlier = None not in (row["finished_at"], other["finished_at"]) and row["finished_at"] < other["finished_at"]
    facts = {name: value for name, value in other.items() if value is not None}
    return (other["status"] in MEASURED or earlier) and not differing_columns(row, facts)


def hardware(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the columns `device` and `hardware` of each row: the GPU's name, or the CPU's name.

    A cell that never ran may have neither. It gets those of the other rows if they agree on one.
    """
    place = pd.DataFrame(
        {"device": frame["device"], "hardware": frame["gpu_name"].where(frame["device"] == "cuda", frame["cpu_model"])}
    )
    places = place.dropna().drop_duplicates()
    if len(places) == 1:
        place.loc[place["device"].isna(), "device"] = places["device"].iloc[0]
    for device, models in places.groupby("device")["hardware"]:
        if len(models) == 1:
            place.loc[(place["device"] == device) & place["hardware"].isna(), "hardware"] = models.iloc[0]
    return place


def newest(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `frame` that no other row of the same cell replaces, in their order.

    Rows are of the same cell if key, device and hardware are equal, on any host and with any software, and if no two
    files declare their operation. The newest row holds, unless a measurement replaces it. A row without a key is a
    separate cell.
    """
    frame = frame.drop(replaced_rows(frame))
    cells = hardware(frame).fillna("")
    cells["key"] = frame["key"].fillna("row " + frame.index.to_series().astype(str))
    paths = frame["workload_definition"].map(_path_of, na_action="ignore").astype(object)
    cells["path"] = paths.fillna(paths.groupby(cells["key"]).transform("last")).fillna("")
    cells["when"] = frame["finished_at"].fillna(frame["started_at"])
    cells = cells.sort_values("when", kind="stable", na_position="first")
    return frame.loc[cells.drop_duplicates(["key", "path", "device", "hardware"], keep="last").index.sort_values()]


def _path_of(definition: str) -> str | None:
    """Return the path of the file that declares an operation. Rows of older versions have none."""
    path = json_object(definition).get("path")
    return path if isinstance(path, str) else None


def json_object(text: Any) -> dict[str, Any]:
    """Return the JSON object that a column of a row has as text. Anything else gives an empty one."""
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        value = json.loads(text)
        return value if isinstance(value, dict) else {}
    return {}


def replaced_rows(frame: pd.DataFrame) -> list[Any]:
    """Return the index of rows that a measurement replaces."""
    measured = frame["status"].isin(MEASURED)
    contested = frame["key"].isin(frame.loc[~measured, "key"].dropna()) & frame["key"].isin(frame.loc[measured, "key"])
    names = ["key", "status", "device", "finished_at", *SOFTWARE, *(name for of in HARDWARE.values() for name in of)]
    rows = frame.loc[contested].reindex(columns=names).astype(object)
    rows = rows.where(rows.notna(), None)
    replaced = []
    for _, same_key in rows.groupby("key"):
        records: Any = list(zip(same_key.index, same_key.to_dict("records"), strict=True))
        measurements = [row for _, row in records if row["status"] in MEASURED]
        replaced += [index for index, row in records if any(is_replaced_by(row, other) for other in measurements)]
    return replaced


def rows_with_missed_work(table: pa.Table) -> list[str]:
    """Return a warning about rows on whose GPUs work goes on for long after the end event, or nothing.

    When a step returns, all its launches are queued. So an honest device is idle after the time of an iteration.
    """
    wait_ms = pc.subtract(table["time_ms"], table["launch_ms"])
    limit_ms = pc.add(pc.multiply(table["device_ms"], _LONGER_WAIT), _WAIT_MS)
    names = table.filter(pc.greater(wait_ms, limit_ms))["row_id"].unique().to_pylist()
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return [
        f"row {printable(str(name))}{others}: the device works for more than twice device_ms after a step has "
        "returned, so device_ms misses work on another stream: let that stream wait for the current one first, and the "
        "current one for it last"
        for name in names[:1]
    ]
