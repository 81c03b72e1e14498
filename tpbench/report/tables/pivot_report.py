"""Tables of one metric as plain data, from which every format is written. All text in them is safe to print."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tpbench.report.grids.records import mark_meanings
from tpbench.report.numbers.interleaved import METHOD
from tpbench.report.numbers.metric import Metric, number, ratio_text
from tpbench.report.numbers.ratio import Ratio


@dataclass(frozen=True)
class PivotCell:
    """One variant on one problem."""

    row_id: str
    status: str
    reason: str = ""
    value: float | None = None
    ratio: float | None = None
    """How many times worse than the best of its line. None if there is no measurement to compare."""
    mark: str = ""
    """A mark of `CAVEATS`."""
    remarks: str = ""
    """Marks of `REMARKS`, beside a time, a rate or a memory."""
    device_ms: float | None = None
    """The device time, to be shown beside the wall time of a host-bound cell."""
    interleaved_ratio: Ratio | None = None
    """The same ratio with its interval, if this cell and the best of its line were measured interleaved."""

    def text(self, metric: Metric) -> str:
        """Return the value, its ratio and its status."""
        if self.value is None:
            return ("OOM" if self.status == "oom" else self.status) + self.mark
        words = [metric.write(self.value) + self.mark + self.remarks]
        if self.device_ms is not None:
            words.append(f"[device {number(self.device_ms)}]")
        if self.interleaved_ratio is not None:
            words.append(f"({_with_interval(self.interleaved_ratio)})")
        elif self.ratio is not None:
            words.append(f"({ratio_text(self.ratio)})")
        if self.status != "ok":
            words.append(self.status)
        return " ".join(words)


def _with_interval(ratio: Ratio) -> str:
    """Return a ratio and its interval, with as many digits as distinguish the three."""
    assert ratio.low is not None and ratio.high is not None
    distance = min(ratio.high - ratio.value, ratio.value - ratio.low)
    digits = min(4, max(2, 1 - math.floor(math.log10(distance)))) if distance > 0 else 2
    return f"{ratio.value:.{digits}f}x, {ratio.low:.{digits}f} to {ratio.high:.{digits}f}"


@dataclass(frozen=True)
class PivotLine:
    """One problem: its keys, and a cell for each column of the table (None: never run)."""

    keys: tuple[str, ...]
    cells: tuple[PivotCell | None, ...]


@dataclass(frozen=True)
class PivotTable:
    """Problems by variants, on one kind of hardware."""

    heading: str
    facts: Mapping[str, str]
    """Values that hold for the whole table, by name."""
    keys: tuple[str, ...]
    columns: tuple[str, ...]
    lines: tuple[PivotLine, ...]
    notes: tuple[str, ...] = ()
    """Sentences that a reader needs before comparing rows."""


@dataclass(frozen=True)
class FailureGroup:
    """Cells that failed with the same status and reason."""

    status: str
    reason: str
    cells: tuple[str, ...]

    @property
    def text(self) -> str:
        """The status, the cells and the reason in one line."""
        more = f" and {len(self.cells) - 2} more" if len(self.cells) > 2 else ""
        return f"{self.status}: {', '.join(self.cells[:2])}{more}: {self.reason or 'no reason given'}"


@dataclass(frozen=True)
class PivotReport:
    """Tables of one metric, with failures and warnings."""

    metric: Metric
    tables: tuple[PivotTable, ...]
    failures: tuple[FailureGroup, ...]
    warnings: tuple[str, ...]

    @property
    def caption(self) -> str:
        """The meaning of the numbers."""
        unit = f", in {self.metric.unit}" if self.metric.unit else ""
        ratio = f"; (2.00x): {self.metric.ratio}" if self.metric.ratio else ""
        return f"{self.metric.name}: {self.metric.doc}{unit}{ratio}"

    @property
    def legend(self) -> tuple[str, ...]:
        """The meaning of the marks that occur, and of "ok" without a value."""
        cells = [cell for table in self.tables for line in table.lines for cell in line.cells if cell]
        lines = list(mark_meanings("".join(cell.mark + cell.remarks for cell in cells)))
        if any(cell.device_ms is not None for cell in cells):
            lines.append("[device 2.000]: device time of a host-bound cell, in ms")
        if any(cell.status == "ok" and cell.value is None for cell in cells):
            lines.append(f"ok: correct, but without {self.metric.name}")
        if any(cell.interleaved_ratio for cell in cells):
            lines.append(f"(2.00x, 1.98 to 2.02): {METHOD}")
        return tuple(lines)
