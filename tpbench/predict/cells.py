"""Read the measured cells that the cost model of the entropy loss is fitted to, and what datasheets say of GPUs."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from tpbench.measure.machine import KNOWN_GPUS, known_gpu
from tpbench.report.analysis.grid import arrange_rows
from tpbench.report.analysis.row_values import is_measurement
from tpbench.settings import JobError
from tpbench.workloads.entropy_loss import WORKLOAD
from tpbench.workloads.entropy_loss.cost_model import LossSize, is_replaced, size_of

CODE = ("git_commit", "kernels_version", "variant_version", "package_versions")
"""Columns that tell the code of a row."""
SAME_TIME = 0.1
"""Code whose device time differs by a larger share has been replaced."""


@dataclass(frozen=True)
class MeasuredCell:
    """One cell that was run on a GPU."""

    label: str  # the variant, with the options that it was run with
    size: LossSize
    row: Mapping[str, Any]  # the columns of its row; a missing value is None


@dataclass(frozen=True)
class MeasuredCells:
    """All usable cells on one GPU model."""

    gpu: str
    cells: tuple[MeasuredCell, ...]
    on_other_gpus: tuple[MeasuredCell, ...] = ()

    @property
    def memory_gib(self) -> float:
        """Memory of the GPU, or 80 GiB if no row says it. A row with a smaller limit says nothing."""
        limits = [cell.row["memory_limit_gib"] for cell in self.cells]
        return max((float(limit) for limit in limits if limit), default=80.0)


def slowdown_of(measured_on: str, gpu: str) -> float | None:
    """Return the datasheets' memory bandwidth of one GPU over that of another. None: one is unknown."""
    one, other = known_gpu(measured_on), known_gpu(gpu)
    return one[1] / other[1] if one and other else None


def _of_present_code(frame: pd.DataFrame) -> list[MeasuredCell]:
    """Return the newest cell of each variant and size. Older code counts unless a cell of both shows another time."""
    code = [name for name in CODE if name in frame]
    versions = [rows for _, rows in frame.sort_values("started_at").groupby(code, dropna=False, sort=False)]
    present: dict[tuple[str, str], dict[LossSize, MeasuredCell]] = defaultdict(dict)
    for version in sorted(versions, key=lambda rows: rows["started_at"].max(), reverse=True):
        found: dict[tuple[str, str], dict[LossSize, MeasuredCell]] = defaultdict(dict)
        for row in (record for grid in arrange_rows(version) for record in grid.records):
            on_one_node = row["device"] == "cuda" and (row["nodes"] or 1) == 1
            excluded = " block_cap=" in row.column or is_replaced(row)
            if on_one_node and is_measurement(row) and not excluded and (size := size_of(row)):
                found[row["gpu_name"], row.column][size] = MeasuredCell(row.column, size, row)
        for key, cells in found.items():
            newer = present[key]
            pairs = [(newer[size].row["device_ms"], cells[size].row["device_ms"]) for size in newer if size in cells]
            if all(abs(new_ms / old_ms - 1) <= SAME_TIME for new_ms, old_ms in pairs if new_ms and old_ms):
                present[key] = cells | newer
    return [cell for cells in present.values() for cell in cells.values()]


def measured(frame: pd.DataFrame, gpu: str | None = None) -> MeasuredCells:
    """Return the newest row of each cell that was measured on one GPU model.

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
        rows = f"no row was measured on {gpu} (there are: {', '.join(sorted(by_gpu))})"
        raise JobError(f"{rows}, and datasheets are known of {', '.join(KNOWN_GPUS)} only: measure a few cells there")
    chosen = max(named or by_gpu, key=lambda name: len(by_gpu[name]))
    others = (cell for name, cells in by_gpu.items() if name != chosen for cell in cells)
    return MeasuredCells(chosen, tuple(by_gpu[chosen]), tuple(others))
