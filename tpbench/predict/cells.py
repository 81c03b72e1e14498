"""Read the measured cells that the cost model of the entropy loss is fitted to, and what datasheets say of GPUs."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from tpbench.measure.machine import KNOWN_GPUS, known_gpu
from tpbench.report.analysis.grid import arrange_rows
from tpbench.report.analysis.records import caveat_mark
from tpbench.settings import JobError
from tpbench.workloads.entropy_loss import WORKLOAD
from tpbench.workloads.entropy_loss.cost_model import LossSize, size_of

CODE = ("git_commit", "kernels_version", "variant_version", "package_versions")
"""Columns that tell the code of a row."""
SAME_TIME = 0.1
"""Code whose device time differs by a larger share has been replaced."""


@dataclass(frozen=True)
class MeasuredCell:
    """One cell that was run on a GPU."""

    label: str
    """The variant, with the options that it was run with."""
    size: LossSize
    row: Mapping[str, Any]
    """The columns of its row. A missing value is None."""


@dataclass(frozen=True)
class MeasuredCells:
    """All usable cells on one GPU model."""

    gpu: str
    cells: tuple[MeasuredCell, ...]

    def _values(self, column: str) -> list[float]:
        return [float(cell.row[column]) for cell in self.cells if cell.row[column]]

    @property
    def memory_gib(self) -> float | None:
        """Memory of the GPU, or None if no row says it. A row with a smaller limit says nothing."""
        return max(self._values("memory_limit_gib"), default=None)

    @property
    def copy_gb_per_s(self) -> float | None:
        """Median copy bandwidth of the GPU, or None if no row has it."""
        known = self._values("copy_gb_per_s")
        return statistics.median(known) if known else None


def _of_present_code(frame: pd.DataFrame) -> list[MeasuredCell]:
    """Return the newest cell of each variant and size, without those of code that was replaced.

    Rows of older code count if no cell that was measured with both says that the newer code is faster or slower.
    """
    frame = frame.reindex(columns=[*frame.columns, *(name for name in CODE if name not in frame)])
    versions = [cells for _, cells in frame.sort_values("started_at").groupby([*CODE], dropna=False, sort=False)]
    present: dict[tuple[str, str], dict[LossSize, MeasuredCell]] = {}
    for version in sorted(versions, key=lambda rows: rows["started_at"].max(), reverse=True):
        found: dict[tuple[str, str], dict[LossSize, MeasuredCell]] = {}
        for row in (record for grid in arrange_rows(version) for record in grid.records):
            size = size_of(row)
            on_one_host = row["device"] == "cuda" and row["gpu_name"] and (row["nodes"] or 1) == 1
            is_tuned = " block_cap=" in row.column
            is_sound = row["status"] in ("ok", "oom") and not caveat_mark(row)
            if on_one_host and is_sound and size is not None and not is_tuned:
                found.setdefault((row["gpu_name"], row.column), {})[size] = MeasuredCell(row.column, size, row)
        for key, cells in found.items():
            newer = present.setdefault(key, {})
            if not any(_differ(newer[size], cells[size]) for size in newer.keys() & cells.keys()):
                present[key] = cells | newer
    return [cell for cells in present.values() for cell in cells.values()]


def _differ(one: MeasuredCell, other: MeasuredCell) -> bool:
    """Return true if two cells of the same size ended otherwise, or took another time."""
    if one.row["status"] != other.row["status"]:
        return True
    times = [cell.row["device_ms"] for cell in (one, other)]
    return None not in times and abs(times[0] / times[1] - 1) > SAME_TIME


def measured(frame: pd.DataFrame, gpu: str | None = None) -> MeasuredCells:
    """Return the newest row of each cell that was measured, or ran out of memory, on one GPU model.

    `gpu` is a part of its name. Without it, and for a known GPU without rows, the model with the most cells is taken.
    Cells that set a block cap are left out. Raises JobError if no cell is left.
    """
    by_gpu: dict[str, list[MeasuredCell]] = {}
    for cell in _of_present_code(frame[frame["workload"] == WORKLOAD.name]):
        by_gpu.setdefault(cell.row["gpu_name"], []).append(cell)
    if not by_gpu:
        raise JobError(f"no row of {WORKLOAD.name} was measured on a GPU: name a folder that has some with --rows")
    named = [name for name in by_gpu if gpu and gpu.upper() in name.upper()]
    if gpu and not named and not known_gpu(gpu):
        raise JobError(
            f"no row was measured on {gpu} (there are: {', '.join(sorted(by_gpu))}): to predict for a GPU without "
            f"rows, name its --gpu-memory and --bandwidth instead, or one of {', '.join(KNOWN_GPUS)}"
        )
    chosen = max(named or by_gpu, key=lambda name: len(by_gpu[name]))
    return MeasuredCells(chosen, tuple(by_gpu[chosen]))
