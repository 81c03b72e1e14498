"""Records: rows of a frame as plain dictionaries, with the texts of their values and the marks beside them."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Collection, Mapping
from typing import Any

import pandas as pd

from tpbench.measure.clocks import TIMED
from tpbench.measure.statistics import is_host_bound
from tpbench.report.analysis.metrics import metric, metrics_of_all, number
from tpbench.results.current_rows import hardware
from tpbench.results.read import plain_rows
from tpbench.settings import spelled
from tpbench.suggestions import printable
from tpbench.tables import MISSING, TableCell
from tpbench.workloads import Workload


class Record(dict[str, Any]):
    """A row by the names of its columns. A column without a value, or that no row has, is None."""

    key: tuple[Any, ...] = ()
    """The values of the keys of its grid, once a grid has placed it."""
    column: str = ""
    """The column of its grid: the variant and the options that it was run with. It is safe to print."""

    def __missing__(self, column: str) -> None:
        return None


INTERPRETED, SINGLE_PASS, CONTRADICTED, HOST_BOUND, THROTTLED, GRAPH_MEMORY, BELOW_FLOOR = "*^≠†‡§¶"
TOLERANCE = 0.05
"""Share by which a time may be below its floor, or a device time above its wall time: both are measurements."""
MARKS = {
    INTERPRETED: "interpreted: correct, but no measurement",
    SINGLE_PASS: "one pass: it served as warm-up, check and time, so it isn't a measurement",
    CONTRADICTED: "clocks contradict: the device time exceeds the wall time by more than both intervals and "
    f"{TOLERANCE:.0%}, so it isn't a measurement",
    HOST_BOUND: "host-bound: the device is idle for more than a fifth of the wall time",
    THROTTLED: "throttled: a GPU lowered its clocks while it measured (throttle_reasons)",
    GRAPH_MEMORY: "with graph_gib: peak_gib with the memory of CUDA graphs, which torch counts in part: an upper bound",
    BELOW_FLOOR: f"faster than its floor: by more than {TOLERANCE:.0%}, so the time, the floor or the result is wrong",
}
"""Marks beside values that a reader must not take at face value. A row with one of the first three isn't ranked."""


def row_records(frame: pd.DataFrame) -> list[Record]:
    """Return each row of `load`, with its `hardware`, and with `graph_gib` added to `peak_gib`: an upper bound."""
    records = list(map(Record, plain_rows(frame.assign(**hardware(frame)))))
    for record in records:
        wall, device = record["time_ms"], record["device_ms"]
        if record["bound"] is None and wall and device is not None and is_host_bound(1 - device / wall):
            record["bound"] = "host"  # the row doesn't say what bounds it, but its two clocks do
        if record["peak_gib"] is not None and record["graph_gib"]:
            record["peak_gib"] += record["graph_gib"]
    return records


def problem_fields(workload: Workload | None) -> dict[str, Any]:
    """Return the fields of a workload's problem, options included, with their defaults (None: no default)."""
    fields = dataclasses.fields(workload.problem) if workload else ()
    return {field.name: None if field.default is dataclasses.MISSING else field.default for field in fields}


def problem_identity(workload: Workload | None) -> dict[str, Any]:
    """Return the fields that identify a problem, with their defaults. Equal problems must show equal losses."""
    options = workload.option_defaults if workload else {}
    return {name: default for name, default in problem_fields(workload).items() if name not in options} | {"dp_size": 1}


def caveat_mark(record: Mapping[str, Any]) -> str:
    """Return the mark of a row that isn't a measurement, or an empty string."""
    device, wall = record.get("device_ci_low_ms"), record.get("time_ci_high_ms")
    contradicted = device is not None and wall is not None and device > (1 + TOLERANCE) * wall
    single_pass = record["warmed_up"] is False
    return INTERPRETED if record["interpreted"] else SINGLE_PASS if single_pass else CONTRADICTED * bool(contradicted)


def is_measurement(record: Mapping[str, Any]) -> bool:
    """Return true if the row is correct and its times are measurements. Only such records are ranked."""
    return record["status"] == "ok" and not caveat_mark(record)


def json_object(text: Any) -> dict[str, Any]:
    """Return the JSON object that a column of a row has as text. Anything else gives an empty one."""
    try:
        value = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def remark_marks(record: Record) -> str:
    """Return the marks of `MARKS` about the times of a correct row, or an empty string."""
    if record["status"] != "ok":
        return ""
    times = [record[name] for name in ("time_ms", "device_ms") if record.get(name) is not None]
    least = (record.get("floor_ms") or 0.0) * (1 - TOLERANCE)
    is_throttled = record.get("throttle_reasons") not in (None, "none")
    below_floor = is_measurement(record) and any(time < least for time in times)
    holds = {HOST_BOUND: record.get("bound") == "host", THROTTLED: is_throttled, BELOW_FLOOR: below_floor}
    return "".join(filter(holds.get, holds))


def marks(record: Record, columns: Collection[str]) -> str:
    """Return the marks beside values of these columns, which may be ratios such as time_ms/device_ms."""
    shown = {part for name in columns for part in name.split("/")}
    metrics = map(metric, shown & {*metrics_of_all()})
    remarks = remark_marks(record) if any(each.better and not each.is_counted for each in metrics) else ""
    # † stands beside wall times, or beside times in a loop if the host of the loop waits.
    if not any(name.startswith("time_") and name.endswith("_ms") for name in shown):
        loop, device = record["chained_ms"] if "chained_ms" in shown else None, record["device_ms"]
        waits = loop and device is not None and is_host_bound(1 - device / loop)
        remarks = HOST_BOUND * bool(waits) + remarks.replace(HOST_BOUND, "")
    in_graph = "peak_gib" in shown and record["status"] == "ok" and record.get("graph_gib")
    return caveat_mark(record) + remarks + GRAPH_MEMORY * bool(in_graph)


def mark_word(mark: str) -> str:
    """Return a mark in words."""
    return MARKS[mark].partition(":")[0]


def mark_meanings(text: str) -> tuple[str, ...]:
    """Return a line for each mark in a text, in a fixed order."""
    return tuple(f"{mark} {meaning}" for mark, meaning in MARKS.items() if mark in text)


def column_label(name: str) -> str:
    """Return the name of a column as a report prints it."""
    return {"tp_size": "tp", "dp_size": "dp"}.get(name, short_text(name, 40))


def named(name: str, value: Any) -> str:
    """Return a column with its value, as a report prints them."""
    return f"{column_label(name)}={value_text(value)}"


def value_text(value: Any) -> str:
    """Return a value as a command line spells it."""
    return MISSING if value is None or value != value else short_text(spelled(value), 60)


def value_item(value: Any) -> float | str:
    """Return a number as it is, and any other value as a text that is safe to print."""
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else value_text(value)


def value_cell(value: Any) -> TableCell:
    """Return the cell of a value, with the number behind its text."""
    return TableCell(value_text(value), value_item(value))


def short_text(text: str, limit: int) -> str:
    """Return a text that is safe to print. If letters are missing, a hash tells it from other long texts."""
    line = printable(text, limit)
    return line if line == text else f"{line} ~{hashlib.sha256(text.encode(errors='replace')).hexdigest()[:4]}"


def hover_text(record: Record) -> str:
    """Return the main numbers of a row with their intervals, its status, and its name, as one line."""
    words = [f"{record.column}: {value_text(record['status'])}"]
    for column, *ends in (*((clock.column, *clock.interval) for clock in TIMED), ("fraction_of_floor",), ("peak_gib",)):
        if record[column] is not None:
            interval = " to ".join(number(record[end]) for end in ends if record[end] is not None)
            words.append(f"{column} {number(record[column])}{interval and f' ({interval})'}")
    return ", ".join([*words, f"row {value_text(record['row_id'])}"])


def sort_key(value: Any) -> tuple[int, float, str]:
    """Return a key that sorts values of mixed types: words, then numbers (also as text), then missing values."""
    try:
        size = 0.0 if value is None else float(value)
    except ValueError:
        size = math.inf
    return (2, 0.0, "") if value is None else (1, size, "") if math.isfinite(size) else (0, 0.0, str(value))
