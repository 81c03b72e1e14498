"""A pivot as plain data: what every format is written from. All text in it is harmless to print (`escape.plain`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tpbench.report.metric import Metric, times
from tpbench.report.ratio import Ratio
from tpbench.report.turns import METHOD

INTERPRETED = "*"
COLD = "^"
MARKS = {
    INTERPRETED: "interpreted: right, but no measurement",
    COLD: "one pass served as warm-up, check and time: no measurement",
}
NEVER_RUN = "-"


@dataclass(frozen=True)
class Cell:
    """One variant on one problem."""

    row_id: str
    status: str
    reason: str = ""
    value: float | None = None
    ratio: float | None = None
    """How many times worse than the best of its line; none where there is no measurement to compare."""
    mark: str = ""
    by_rounds: Ratio | None = None
    """The same with its interval, where this cell and the best of its line were measured in turns."""

    def text(self, metric: Metric) -> str:
        """What a person reads."""
        if self.value is None:
            return ("OOM" if self.status == "oom" else self.status) + self.mark
        words = [metric.write(self.value) + self.mark]
        if self.by_rounds is not None:
            words.append(f"({_with_interval(self.by_rounds)})")
        elif self.ratio is not None:
            words.append(f"({times(self.ratio)})")
        if self.status != "ok":
            words.append(self.status)
        return " ".join(words)


def _with_interval(ratio: Ratio) -> str:
    """Its ends with as many digits as tell them apart from it."""
    assert ratio.low is not None and ratio.high is not None
    distance = min(ratio.high - ratio.value, ratio.value - ratio.low)
    digits = min(4, max(2, 1 - math.floor(math.log10(distance)))) if distance > 0 else 2
    return f"{ratio.value:.{digits}f}x, {ratio.low:.{digits}f} to {ratio.high:.{digits}f}"


@dataclass(frozen=True)
class Line:
    """One problem: its keys, and a cell for each of the table's columns (None: never run)."""

    keys: tuple[str, ...]
    cells: tuple[Cell | None, ...]


@dataclass(frozen=True)
class Table:
    """Problems by variants, on one kind of hardware."""

    facts: Mapping[str, str]
    """What holds for the whole table, by name."""
    keys: tuple[str, ...]
    columns: tuple[str, ...]
    lines: tuple[Line, ...]

    @property
    def heading(self) -> str:
        """The facts as one line."""
        return heading(self.facts)


def heading(facts: Mapping[str, str]) -> str:
    """Facts as one line. What names itself stands bare, a number with its name."""
    bare = {"workload", "device", "hardware", "loss", "dtype"}
    return ", ".join(value if name in bare else f"{name}={value}" for name, value in facts.items())


@dataclass(frozen=True)
class Failure:
    """Cells that ended alike."""

    status: str
    reason: str
    cells: tuple[str, ...]

    @property
    def text(self) -> str:
        """One line: how, where and why."""
        more = f" and {len(self.cells) - 2} more" if len(self.cells) > 2 else ""
        return f"{self.status}: {', '.join(self.cells[:2])}{more}: {self.reason or 'no reason given'}"


@dataclass(frozen=True)
class Report:
    """Tables of one metric, and what must be said beside them."""

    metric: Metric
    tables: tuple[Table, ...]
    failures: tuple[Failure, ...]
    warnings: tuple[str, ...]

    @property
    def caption(self) -> str:
        """What the numbers are."""
        unit = f", in {self.metric.unit}" if self.metric.unit else ""
        ratio = f"; (2.00x): {self.metric.ratio}" if self.metric.ratio else ""
        return f"{self.metric.name}: {self.metric.doc}{unit}{ratio}"

    @property
    def legend(self) -> tuple[str, ...]:
        """The meaning of the marks that occur, and of a bare "ok"."""
        cells = [cell for table in self.tables for line in table.lines for cell in line.cells if cell]
        used = {cell.mark for cell in cells}
        lines = [f"{mark} {meaning}" for mark, meaning in MARKS.items() if mark in used]
        if any(cell.status == "ok" and cell.value is None for cell in cells):
            lines.append(f"ok: right, but without {self.metric.name}")
        if any(cell.by_rounds for cell in cells):
            lines.append(f"(2.00x, 1.98 to 2.02): {METHOD}")
        return tuple(lines)
