"""Values of rows: the metrics that a table can show, the marks beside them, and how all of them are written."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tpbench.columns import Column
from tpbench.measure.clocks import DECIDING, STATISTICS, TIMED, Clock
from tpbench.measure.statistics import is_host_bound
from tpbench.results.schema import COLUMNS, all_columns
from tpbench.settings import JobError
from tpbench.suggestions import amount, number, unknown
from tpbench.tables import UNDECIDED, short_text, value_text

METRICS = [column.name for column in COLUMNS if column.better is not None]
"""Metrics of every workload. A workload may add its own."""
TITLES = {clock.column: clock.title for clock in (*DECIDING, *TIMED)} | {
    "fraction_of_floor": "Share of the floor",
    "peak_gib": "Extra peak memory",
}
"""Metrics that pictures and pages show first, with their titles."""

INTERPRETED, SINGLE_PASS, CONTRADICTED, HOST_BOUND, THROTTLED, SHARED_HOST, GRAPH_MEMORY, BELOW_FLOOR = "*^≠†‡‖§¶"
TOLERANCE = 0.05
"""Share by which a time may be below its floor, or a device time above its wall time: both are measurements."""
MARKS = {
    INTERPRETED: "interpreted: correct, but no measurement",
    SINGLE_PASS: "one pass: it served as warm-up, check and time, so it isn't a measurement",
    CONTRADICTED: "clocks contradict: the device time exceeds the wall time by more than both intervals and "
    f"{TOLERANCE:.0%}, so it isn't a measurement",
    HOST_BOUND: "host-bound: the device is idle for more than a fifth of the wall time",
    THROTTLED: "throttled: a GPU lowered its clocks while it measured (throttle_reasons)",
    SHARED_HOST: "shared host: other GPUs of the host had work at the same time (beside)",
    GRAPH_MEMORY: "with graph_gib: peak_gib with the memory of CUDA graphs, which torch counts in part: an upper bound",
    BELOW_FLOOR: f"faster than its floor: by more than {TOLERANCE:.0%}, so the time, the floor or the result is wrong",
    UNDECIDED: "undecided: two runs may differ as much by chance alone, or samples are too few to tell",
}
"""Marks beside values that a reader must not take at face value. A row with one of the first three isn't ranked."""


class Record(dict[str, Any]):
    """A row by the names of its columns. A column without a value, or that no row has, is None."""

    key: tuple[Any, ...] = ()
    """The values of the keys of its grid, once a grid has placed it."""
    column: str = ""
    """The column of its grid: the variant and the options that it was run with. It is safe to print."""

    def __missing__(self, column: str) -> None:
        return None


@dataclass(frozen=True)
class Metric(Column):
    """A column with numbers that a table can show."""

    better: int = 0
    """-1: less is better. 1: more is better. 0: neither, and no ratio is shown."""

    @property
    def is_counted(self) -> bool:
        """True for numbers of bytes or operations, which don't depend on the host and on clocks."""
        return self.unit in ("bytes", "FLOP", "GiB")

    @property
    def clock(self) -> Clock | None:
        """The clock of which it is a statistic."""
        return next((clock for clock in TIMED if self.name in map(clock.statistic, STATISTICS)), None)

    def write(self, value: float) -> str:
        """Return the value with its unit, in about four digits."""
        return amount(value, self.unit)


def metric(name: str) -> Metric:
    """Return the metric of that name, of any row or of one workload. Raises JobError that lists the valid names."""
    column = all_columns().get(name)
    if column is None or column.better is None:
        raise JobError(unknown("metric", name, metrics_of_all()))
    return Metric(**vars(column))


def metrics_of_all() -> list[str]:
    """Return the names of all metrics, those of single workloads last."""
    return [column.name for column in all_columns().values() if column.better is not None]


def caveat_mark(row: Mapping[str, Any]) -> str:
    """Return the mark of a row that isn't a measurement, or an empty string."""
    device, wall = row.get("device_ci_low_ms"), row.get("time_ci_high_ms")
    contradicted = device is not None and wall is not None and device > (1 + TOLERANCE) * wall
    single_pass = row["warmed_up"] is False
    return INTERPRETED if row["interpreted"] else SINGLE_PASS if single_pass else CONTRADICTED * bool(contradicted)


def is_measurement(row: Mapping[str, Any]) -> bool:
    """Return true if the row is correct and its times are measurements. Only such rows are ranked."""
    return row["status"] == "ok" and not caveat_mark(row)


def remark_marks(record: Record) -> str:
    """Return the marks of `MARKS` about the times of a correct row, or an empty string."""
    if record["status"] != "ok":
        return ""
    times = [record[name] for name in ("time_ms", "device_ms") if record[name] is not None]
    least = (record["floor_ms"] or 0.0) * (1 - TOLERANCE)
    is_throttled = record["throttle_reasons"] not in (None, "none")
    below_floor = is_measurement(record) and any(time < least for time in times)
    holds = {HOST_BOUND: record["bound"] == "host", THROTTLED: is_throttled, SHARED_HOST: record["beside"]}
    return "".join(filter(holds.get, holds)) + BELOW_FLOOR * below_floor


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
    in_graph = "peak_gib" in shown and record["status"] == "ok" and record["graph_gib"]
    return caveat_mark(record) + remarks + GRAPH_MEMORY * bool(in_graph)


def mark_words(marked: str) -> list[str]:
    """Return the marks of a text in words."""
    return [MARKS[mark].partition(":")[0] for mark in marked]


def mark_meanings(text: str) -> list[str]:
    """Return a line for each mark in a text, in a fixed order."""
    return [f"{mark} {meaning}" for mark, meaning in MARKS.items() if mark in text]


def column_label(name: str) -> str:
    """Return the name of a column as a report prints it."""
    return {"tp_size": "tp", "dp_size": "dp"}.get(name, short_text(name, 40))


def named(name: str, value: Any) -> str:
    """Return a column with its value, as a report prints them."""
    return f"{column_label(name)}={value_text(value)}"


def interval_of(record: Record, name: str) -> tuple[float, float]:
    """Return the ends of the confidence interval of a value. Without an interval both are the value itself."""
    low, high = next((clock.interval for clock in TIMED if clock.column == name), (name, name))
    return record[low] or record[name], record[high] or record[name]


def hover_text(record: Record) -> str:
    """Return the main numbers of a row with their intervals, its status, and its name, as one line."""
    words = [f"{record.column}: {value_text(record['status'])}"]
    for column, *ends in (*((clock.column, *clock.interval) for clock in TIMED), ("fraction_of_floor",), ("peak_gib",)):
        if record[column] is not None:
            interval = " to ".join(number(record[end]) for end in ends if record[end] is not None)
            words.append(f"{column} {number(record[column])}{interval and f' ({interval})'}")
    return ", ".join([*words, f"row {value_text(record['row_id'])}"])
