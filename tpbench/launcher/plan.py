"""From composed configurations to the cells of a sweep, each of which will run or is skipped for a stated reason."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from tpbench.fields import JobError
from tpbench.job import Job, parse_job, refusal
from tpbench.measure import machine


@dataclass(frozen=True)
class Request:
    """One job as Hydra composed it."""

    index: int
    values: dict[str, Any]
    """Flat field names to plain values."""
    chosen: list[str]
    """Fields that the command line set."""
    overrides: list[str]
    folders: list[Path]
    """Where the configuration came from."""


@dataclass(frozen=True)
class Cell:
    """One cell of a sweep."""

    index: int
    job: Job
    obstacle: str | None
    """Why this machine cannot run it, or None."""
    same_as: int | None = None
    """Index of an earlier cell that is the same job (they differ in an option that their variant does not have)."""
    resume: bool = False


def plan(requests: Sequence[Request]) -> list[Cell]:
    """Validate every request. Raises JobError with all complaints, each once, before anything is launched."""
    gpus = machine.gpu_count()
    cells: list[Cell] = []
    complaints: list[str] = []
    first_with: dict[str, int] = {}
    for request in requests:
        try:
            job = parse_job(request.values, request.chosen, _shapes(request.folders))
        except JobError as error:
            complaints += str(error).splitlines()
            continue
        if job.device == "auto":
            job = replace(job, device="cuda" if gpus else "cpu")
        same_as = first_with.setdefault(job.key, request.index)
        resume = str(request.values.get("resume")).lower() == "true"
        cells.append(
            Cell(request.index, job, obstacle(job, gpus), None if same_as == request.index else same_as, resume)
        )
    if complaints:
        raise JobError("\n".join(dict.fromkeys(complaints)))
    if refused := [refusal(cell.job) for cell in cells]:
        if all(refused):  # in a mixed sweep a pair that does not exist is a hole in the table, alone it is a mistake
            raise JobError("\n".join(dict.fromkeys(str(each) for each in refused)))
    return cells


def obstacle(job: Job, gpus: int) -> str | None:
    """Why the job cannot run here, or None: its variant, a missing package, too few GPUs."""
    if reason := refusal(job):
        return reason
    if missing := [each for each in job.implementation.needs if importlib.util.find_spec(each) is None]:
        return f"needs {', '.join(missing)} (not installed)"
    if job.device == "cuda" and job.world_size > gpus:
        return f"needs {job.world_size} GPUs, found {gpus}"
    if job.device == "cpu" and job.implementation.needs_cuda:
        return "needs a CUDA GPU"
    if job.device == "cpu" and job.measure.graph:
        return "graph=true needs a CUDA GPU"
    return None


def _shapes(folders: Sequence[Path]) -> dict[str, str]:
    """Every shape file by name, with the workload that it is for."""
    files = [each for folder in folders for each in (folder / "shape").glob("*.yaml")]
    return {each.stem: (yaml.safe_load(each.read_text()) or {}).get("shape_workload", "") for each in files}
