"""Study `late`: what a rank that starts late costs the others, and work on another stream of their GPUs."""

from collections.abc import Mapping, Sequence
from typing import Any

from tpbench.measure.clocks import LATE_MS
from tpbench.settings import spelled
from tpbench.tables import Table, TableCell, number_cell
from tpbench.workloads import workloads
from tpbench.workloads.study_data import oldest_first

_DELAYS = [f"{delay:g} ms late" for delay in LATE_MS]


def _by_problem(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Return the newest rows by problem and machine, then by the label of the variant."""
    problems: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for row in (row for row in oldest_first(rows) if row.get("late_ms") is not None):
        workload = workloads()[row["workload"]]
        names = dict.fromkeys((*workload.pivot.sections, *workload.headline, "tp_size", "dp_size"))
        values = [(name, row.get(name)) for name in names if name not in workload.option_defaults]
        facts = tuple((name, value) for name, value in values if value is not None)
        problems.setdefault((facts, str(row["gpu_name"] or row["cpu_model"])), {})[row["label"]] = row
    return {
        ", ".join([*(f"{name}={spelled(value)}" for name, value in facts), machine]): problems[facts, machine]
        for facts, machine in sorted(problems)
    }


def tables(rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Return two tables of each problem: the other ranks' time, and that of products beside it."""
    made = []
    for problem, lines in _by_problem(rows).items():
        waits = [[TableCell(line), *map(_ms, row["late_ms"])] for line, row in lines.items()]
        heading = f"time of the other ranks, minus the delay of the late one, ms: {problem}"
        made.append(Table(heading, ("variant", *_DELAYS), waits))
        beside = [
            [TableCell(line), *map(_ms, (row["beside_alone_ms"], *row["beside_ms"]))]
            for line, row in lines.items()
            if row.get("beside_ms") is not None
        ]
        if beside:
            heading = f"time of three products of 4096^3 on another stream of the other ranks, ms: {problem}"
            made.append(Table(heading, ("variant", "alone", *_DELAYS), beside))
    return made


def _ms(value: float) -> TableCell:
    return number_cell(value, "{:.3f}".format)
