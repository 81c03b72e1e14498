"""Cells, and stored rows of cells, without running anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tpbench.handover.task import CellRow
from tpbench.job import parse_job
from tpbench.launcher.plan import Cell

FACTS = {
    "host": "here",
    "cpu_model": "a CPU",
    "gpu_name": "a GPU",
    "driver_version": "600.1",
    "torch_version": "2.13.0",
    "triton_version": "3.9.0",
    "kernels_version": "abc",
}


def cell(index: int, output_dir: Path, obstacle: str | None = None, **values: Any) -> Cell:
    """Return a cell of a small job."""
    base = {"variant": "triton_tp", "tokens": 64, "vocab": 1000, "tp_size": 2, "device": "cuda"}
    return Cell(index, parse_job({**base, "output_dir": str(output_dir), **values}), obstacle)


def measured(of: Cell, status: str = "ok", reason: str | None = None, **facts: Any) -> None:
    """Store a row of that cell. `facts` replace the facts of the machine."""
    CellRow.begin(of.job, cell=of.index, **{**FACTS, **facts}).write(status, reason)
