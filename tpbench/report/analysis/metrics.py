"""Metrics, the numbers of a row that a table can show, and how they are written."""

import math
from dataclasses import dataclass

from tpbench.measure.clocks import DECIDING, TIMED, statistics_columns
from tpbench.results.schema import COLUMNS, all_columns
from tpbench.settings import JobError
from tpbench.suggestions import memory_text, unknown

METRICS = [column.name for column in COLUMNS if column.better is not None]
"""Metrics of every workload. A workload may add its own."""
TITLES = {clock.column: clock.title for clock in (*DECIDING, *TIMED)} | {
    "fraction_of_floor": "Share of the floor",
    "peak_gib": "Extra peak memory",
}
"""Metrics that pictures and pages show first, with their titles."""


@dataclass(frozen=True)
class Metric:
    """A number of a row, its meaning, and which of two values is better."""

    name: str
    doc: str
    unit: str
    better: int
    """-1: less is better. 1: more is better. 0: neither, and no ratio is shown."""

    @property
    def is_counted(self) -> bool:
        """True for numbers of bytes or operations, which don't depend on the host and on clocks."""
        return self.unit in ("bytes", "FLOP", "GiB")

    @property
    def is_time(self) -> bool:
        """True for statistics of a clock."""
        return self.name in {column.name for column in statistics_columns()}

    def write(self, value: float) -> str:
        """Return the value with its unit, in about four digits."""
        return amount(value, self.unit)


def metric(name: str) -> Metric:
    """Return the metric of that name, of any row or of one workload. Raises JobError that lists the valid names."""
    names, column = metrics_of_all(), all_columns().get(name)
    if column is None or column.better is None:
        raise JobError(unknown("metric", name, names))
    return Metric(name, column.doc, column.unit, column.better)


def metrics_of_all() -> list[str]:
    """Return the names of all metrics, those of single workloads last."""
    return [column.name for column in all_columns().values() if column.better is not None]


def number(value: float) -> str:
    """Return about four significant digits, without an exponent if that is readable."""
    size = abs(value)
    if not math.isfinite(value) or 0 < size < 0.1 or size >= 1e15:
        return f"{value:.3g}"
    digits = 0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 10 else 3
    return f"{value:.{digits}f}"


def amount(value: float, unit: str) -> str:
    """Return a number with its unit: less than 0.1 GiB in MiB or KiB."""
    return memory_text(value) if unit == "GiB" and 0 < value < 0.1 else f"{number(value)} {unit}".rstrip()


def ratio_text(ratio: float) -> str:
    """Return a ratio such as "2.00x". Beyond a thousand its digits say nothing: one of the two values is near zero."""
    if ratio >= 1000:
        return ">999x"
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.1f}x" if ratio < 100 else f"{ratio:.0f}x"


def counted(number_of: int, what: str) -> str:
    """Return a number with its noun, which gets an `s` unless the number is 1."""
    return f"{number_of} {what}{'' if number_of == 1 else 's'}"
