"""Which cells a resumed sweep need not run again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from tpbench.launcher.plan import Cell
from tpbench.results.plain import plain_rows
from tpbench.results.read import load

FINISHED = ("ok", "oom", "wrong", "skipped")
SAME_MACHINE = ("gpu_name", "driver_version", "torch_version", "triton_version", "kernels_version")
"""What must be as it was for an old row to stand for a cell, besides the job itself."""


def finished_rows(cells: Sequence[Cell], facts: Mapping[str, Any]) -> dict[int, pd.DataFrame]:
    """For each cell to resume that has one, the newest finished row of the same job on the same kind of machine."""
    resumed = [cell for cell in cells if cell.resume]
    found: dict[tuple[str, str], pd.DataFrame] = {}
    for output_dir in {cell.job.output_dir for cell in resumed}:
        frame = load(output_dir).sort_values("finished_at")
        for index, row in enumerate(plain_rows(frame)):
            if row["status"] in FINISHED and all(row[name] == facts.get(name) for name in SAME_MACHINE):
                found[output_dir, row["key"]] = frame.iloc[[index]]
    rows: dict[int, pd.DataFrame] = {}
    for cell in resumed:
        stored = found.get((cell.job.output_dir, cell.job.key))
        # A skipped cell is worth another look once its obstacle is gone.
        if stored is not None and (cell.obstacle or stored["status"].item() != "skipped"):
            rows[cell.index] = stored
    return rows
