"""Cells, and stored rows of cells, without running anything."""

from pathlib import Path
from typing import Any

from tpbench.job import parse_job
from tpbench.launcher.attempt import Attempt, new_task, store
from tpbench.launcher.planning.plan import Cell

FACTS = {
    "host": "here",
    "cpu_model": "a CPU",
    "gpu_name": "a GPU",
    "driver_version": "600.1",
    "torch_version": "2.13.0",
    "triton_version": "3.9.0",
    "kernels_version": "abc",
}


def cell(index: int, output_dir: Path, skip_reason: str | None = None, **values: Any) -> Cell:
    """Return a cell of a small job."""
    base = {"variant": "triton_tp", "tokens": 64, "vocab": 1000, "tp_size": 2, "device": "cuda"}
    return Cell(index, parse_job({**base, "output_dir": str(output_dir), **values}), skip_reason)


def measured(of: Cell, status: str = "ok", reason: str | None = None, **facts: Any) -> None:
    """A row of that cell, as the facts were then."""
    task = new_task(of.job, Path(of.job.output_dir), cell=of.index, **{**FACTS, **facts})
    store(task.result(status, reason), of.job, task.folder)


def begun(output_dir: Path, index: int = 0) -> Attempt:
    """Return an attempt of the sweep S whose ranks have not started yet."""
    sweep = output_dir / "sweeps" / "S"
    sweep.mkdir(parents=True, exist_ok=True)
    attempt = Attempt.plan(cell(index, output_dir, seed=index), sweep, FACTS).begin()
    attempt.task.save(attempt.task_file)
    return attempt
