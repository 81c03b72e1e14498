"""Read the measured cells that a cost model is fitted to from rows."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pandas as pd

from tpbench.predict.memory import KNOWN_GPUS, known_gpu
from tpbench.report.analysis.grid import arrange_rows
from tpbench.report.analysis.records import caveat_mark
from tpbench.settings import JobError
from tpbench.workloads import Workload, workloads
from tpbench.workloads.cost_model import CostModel

_NUMBERS = ("time_ms", "device_ms", "peak_gib", "bytes_communicated", "memory_limit_gib", "copy_gb_per_s")
"""Columns with the numbers of a `MeasuredCell`, in its order."""


@dataclass(frozen=True)
class MeasuredCell:
    """One cell that was run on a GPU."""

    label: str
    """The variant, with the options that it was run with."""
    size: Any
    """The problem's `ProblemSize`."""
    status: str
    time_ms: float | None
    device_ms: float | None
    peak_gib: float | None
    bytes_communicated: float | None
    memory_limit_gib: float | None = None
    copy_gb_per_s: float | None = None


@dataclass(frozen=True)
class MeasuredCells:
    """All usable cells of one workload on one GPU model."""

    cost_model: CostModel
    gpu: str
    cells: tuple[MeasuredCell, ...]

    @property
    def memory_gib(self) -> float | None:
        """Memory of the GPU, or None if no row says it. A row with a smaller limit says nothing."""
        return max((cell.memory_limit_gib for cell in self.cells if cell.memory_limit_gib), default=None)

    @property
    def ran_out(self) -> list[tuple[MeasuredCell, float]]:
        """The cells that ran out of memory, with the memory in GiB that each had: its limit, or all of the GPU's."""
        failed = [(cell, cell.memory_limit_gib or self.memory_gib) for cell in self.cells if cell.status == "oom"]
        return [(cell, memory_gib) for cell, memory_gib in failed if memory_gib]

    @property
    def copy_gb_per_s(self) -> float | None:
        """Median copy bandwidth of the GPU, or None if no row has it."""
        known = [cell.copy_gb_per_s for cell in self.cells if cell.copy_gb_per_s]
        return statistics.median(known) if known else None

    @property
    def labels(self) -> list[str]:
        """The variants of these cells, most measured first."""
        return [label for label, _ in Counter(cell.label for cell in self.cells if cell.status == "ok").most_common()]


def cost_models() -> dict[str, CostModel]:
    """Return the cost models of the workloads that have one, by the workload's name."""
    return {name: workload.cost_model() for name, workload in workloads().items() if workload.cost_model is not None}


def measured(frame: pd.DataFrame, workload: Workload, gpu: str | None = None) -> MeasuredCells:
    """Return the newest row of each cell of a workload that was measured, or ran out of memory, on one GPU model.

    `gpu` is a part of its name. Without it, and for a known GPU without rows, the model with the most cells is taken.
    Cells that set a tuning option, such as a block cap, are left out. Raises JobError if no cell is left.
    """
    cost_model = cost_models()[workload.name]
    by_gpu: dict[str, list[MeasuredCell]] = {}
    arranged = arrange_rows(frame[frame["workload"] == workload.name])
    for cell in (cell for grid in arranged.grids for cell in grid.cells()):
        record, label = cell.record, cell.column
        on_one_host = record["device"] == "cuda" and record["gpu_name"] and (record["nodes"] or 1) == 1
        size = cost_model.size_of(record)
        if not on_one_host or caveat_mark(record) or record["status"] not in ("ok", "oom") or size is None:
            continue
        if not any(f" {name}=" in label for name in cost_model.tuning_options):
            numbers = [float(value) if isinstance(value := record[name], (int, float)) else None for name in _NUMBERS]
            by_gpu.setdefault(record["gpu_name"], []).append(MeasuredCell(label, size, record["status"], *numbers))
    if not by_gpu:
        raise JobError(f"no row of {workload.name} was measured on a GPU: name a folder that has some with --rows")
    named = [name for name in by_gpu if gpu and gpu.upper() in name.upper()]
    if gpu and not named and not known_gpu(gpu):
        raise JobError(
            f"no row was measured on {gpu} (there are: {', '.join(sorted(by_gpu))}): to predict for a GPU without "
            f"rows, name its --gpu-memory and --bandwidth instead, or one of {', '.join(KNOWN_GPUS)}"
        )
    chosen = max(named or by_gpu, key=lambda name: len(by_gpu[name]))
    return MeasuredCells(cost_model, chosen, tuple(by_gpu[chosen]))
