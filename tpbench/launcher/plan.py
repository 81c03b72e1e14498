"""From composed configurations to the cells of a sweep, each of which will run or is skipped for a stated reason."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import yaml

from tpbench.job import Job, parse_job, unsupported_reason
from tpbench.launcher.options import SWEEP_OPTION_NAMES, SweepOptions
from tpbench.measure import machine
from tpbench.settings import JobError, parse


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
    telling: tuple[str, ...] = ()
    """Fields that tell it from other cells of the sweep which are called the same."""

    def __str__(self) -> str:
        flat = self.job.flat() if self.telling else {}
        return " ".join([str(self.job), *(f"{name}={flat[name]}" for name in self.telling)])


class Place(Protocol):
    """What cells are planned for."""

    @property
    def device(self) -> Literal["cuda", "cpu"]:
        """What device=auto means there."""

    def obstacle(self, job: Job) -> str | None:
        """Why the job cannot run there, or None."""


@dataclass(frozen=True)
class ThisHost:
    """The machine that this process runs on."""

    gpus: int

    @property
    def device(self) -> Literal["cuda", "cpu"]:
        return "cuda" if self.gpus else "cpu"

    def obstacle(self, job: Job) -> str | None:
        if job.device == "cuda" and job.world_size > self.gpus:
            return f"needs {job.world_size} GPUs, found {self.gpus}"
        return None


def plan(requests: Sequence[Request], place: Place | None = None) -> list[Cell]:
    """Validate every request. Raises JobError with all complaints, each once, before anything is launched."""
    place = place or ThisHost(machine.gpu_count())
    cells: list[Cell] = []
    complaints: list[str] = []
    first_with: dict[str, int] = {}
    shapes = functools.cache(_shapes)
    for request in requests:
        try:
            job = parse_job(request.values, request.chosen, shapes(tuple(request.folders)), SWEEP_OPTION_NAMES)
        except JobError as error:
            complaints += str(error).splitlines()
            continue
        if job.device == "auto":
            job = replace(job, device=place.device)
        same_as = first_with.setdefault(job.key, request.index)
        cells.append(Cell(request.index, job, obstacle(job, place), None if same_as == request.index else same_as))
    if complaints:
        raise JobError("\n".join(dict.fromkeys(complaints)))
    refused = [(cell.job.implementation.name, unsupported_reason(cell.job)) for cell in cells]
    if cells and all(reason for _, reason in refused):
        # In a mixed sweep a pair that does not exist is a hole in the table, alone it is a mistake.
        said = (reason if str(reason).startswith(name) else f"{name}: {reason}" for name, reason in refused)
        raise JobError("\n".join(dict.fromkeys(map(str, said))))
    return told_apart(cells)


def told_apart(cells: Sequence[Cell]) -> list[Cell]:
    """The cells, called by what their jobs are called and, where that is not enough to tell one from another, by the
    fields that vary: seeds, distributions, settings of the measurement."""
    flats = [cell.job.flat() for cell in cells]
    names: list[tuple[object, ...]] = [(str(cell.job),) for cell in cells]
    telling = []
    for field in dict.fromkeys(name for flat in flats for name in flat):
        values = [repr(flat.get(field)) for flat in flats]
        if len(set(zip(names, values, strict=True))) > len(set(names)):
            telling.append(field)
            names = [(*name, value) for name, value in zip(names, values, strict=True)]
    return [
        replace(cell, telling=tuple(field for field in telling if field in flat))
        for cell, flat in zip(cells, flats, strict=True)
    ]


def conduct(requests: Sequence[Request]) -> SweepOptions:
    """How the whole sweep is run. Raises JobError where its jobs do not agree on that."""
    found: list[SweepOptions] = [parse(SweepOptions, request.values) for request in requests]
    for each in fields(SweepOptions):
        if len({getattr(one, each.name) for one in found}) > 1:
            raise JobError(f"{each.name} is one setting for the whole sweep: it cannot be swept")
    how = found[0] if found else SweepOptions()
    if how.order == "interleaved" and not how.reuse:
        raise JobError("order=interleaved needs reuse=true: cells that take turns have to stay between their rounds")
    return how


def obstacle(job: Job, place: Place) -> str | None:
    """Why the job cannot run there, or None: its variant, a missing package, too few GPUs."""
    if reason := unsupported_reason(job):
        return reason
    if missing := [each for each in job.implementation.requires if importlib.util.find_spec(each) is None]:
        return f"needs {', '.join(missing)} (not installed)"
    if reason := place.obstacle(job):
        return reason
    if job.device == "cuda" and job.implementation.cpu_only_reason:
        return job.implementation.cpu_only_reason
    if job.device == "cpu" and job.requires_cuda:
        return "needs a CUDA GPU"
    if job.device == "cpu" and job.measure.graph:
        return "graph=true needs a CUDA GPU"
    return job.workload.unsupported_reason(job)


def _shapes(folders: tuple[Path, ...]) -> dict[str, str]:
    """Every shape file by name, with the workload that it is for."""
    files = [each for folder in folders for each in (folder / "shape").glob("*.yaml")]
    return {each.stem: (yaml.safe_load(each.read_text()) or {}).get("shape_workload", "") for each in files}
