"""The plan of a sweep: composed configurations become cells, and each cell either runs or is skipped for a reason."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from tpbench import packages
from tpbench.job import FRESH, Job, parse_job, unsupported_reason
from tpbench.launcher.command_line.rewrites import model_files
from tpbench.launcher.devices import available_cores
from tpbench.launcher.options import SWEEP_OPTION_NAMES, SweepOptions, read_choice
from tpbench.outside.variant import OutsideVariant
from tpbench.settings import JobError, parse, spelled
from tpbench.workloads.sizes import ITEM_BYTES


@dataclass(frozen=True)
class Request:
    """One job as Hydra composed it."""

    index: int
    values: dict[str, Any]
    """Flat field names to plain values."""
    chosen: list[str]
    """Fields that the command line set."""
    folders: list[Path]
    """Folders that the configuration came from."""


@dataclass(frozen=True)
class Cell:
    """One cell of a sweep."""

    index: int
    job: Job
    skip_reason: str | None
    """Why the cell is skipped, or None if it runs."""
    same_as: int | None = None
    """Index of an earlier cell with the same job. The two differ in an option that their variant does not have."""
    distinguishing: tuple[str, ...] = ()
    """Fields that distinguish this cell from cells of the sweep whose jobs have the same text."""
    ignored: tuple[str, ...] = ()
    """Options and settings that the command line set and that cannot change the cell."""

    @property
    def runs(self) -> bool:
        """True if the cell is neither skipped nor the same job as an earlier one."""
        return self.skip_reason is None and self.same_as is None

    def __str__(self) -> str:
        flat = self.job.flat() if self.distinguishing else {}
        return " ".join([str(self.job), *(f"{name}={spelled(flat[name])}" for name in self.distinguishing)])


def plan(
    requests: Sequence[Request], target: PlanningTarget, outside: Mapping[str, OutsideVariant] | None = None
) -> list[Cell]:
    """Return one cell per request. `outside`: the variants from outside this package that the command line names.

    Raises JobError before anything is launched. Its message has every invalid value of all requests, each once.
    """
    cells: list[Cell] = []
    errors: list[str] = []
    first_with: dict[str, int] = {}
    shapes = functools.cache(_shape_workloads)
    for request in requests:
        try:
            shape_workloads = shapes(tuple(request.folders))
            if ".py:" in str(file := request.values.get("model_dir")) and file not in model_files:
                raise JobError(f"model_dir={file}: only a command line may name a file, as model=FILE.py:NAME")
            job = parse_job(request.values, request.chosen, shape_workloads, SWEEP_OPTION_NAMES, outside)
            if outside and FRESH in request.chosen and not job.measure.fresh:
                raise JobError("fresh=false: inputs change for all variants of a sweep with one from outside tpbench")
        except JobError as error:
            errors += str(error).splitlines()
            continue
        if job.device == "auto":
            job = replace(job, device=target.device)
        if outside and not job.scheduled:  # inputs change for all variants alike, as they do for one from outside
            job = replace(job, measure=replace(job.measure, fresh=True))
        first = first_with.setdefault(job.key, request.index)
        same_as = None if first == request.index else first
        cells.append(
            Cell(request.index, job, skip_reason(job, target), same_as, ignored=_ignored_options(job, request))
        )
    if errors:
        raise JobError("\n".join(dict.fromkeys(errors)))
    invalid = [(cell.job.implementation.name, invalid_reason(cell.job, target)) for cell in cells]
    if cells and all(reason for _, reason in invalid):
        # A sweep may have some pairs that cannot run: they are empty places in its table. Here no pair can run.
        lines = (reason if str(reason).startswith(name) else f"{name}: {reason}" for name, reason in invalid)
        raise JobError("\n".join(dict.fromkeys(map(str, lines))))
    return distinguish(cells)


def _ignored_options(job: Job, request: Request) -> tuple[str, ...]:
    """Return the names that the command line set and that the job ignores.

    They are options whose value is not the default, and settings of a measurement.
    """
    defaults = job.workload.option_defaults
    ignorable = [each.name for each in job.workload.options if each.ignorable]
    options = [
        name
        for name in ignorable
        if name in request.chosen
        and name not in job.implementation.options
        and str(request.values.get(name)).lower() != str(defaults[name]).lower()
    ]
    return (*options, *sorted(job.unused_settings.intersection(request.chosen)))


def ignored_notes(cells: Sequence[Cell]) -> list[str]:
    """Return a line for each variant that ignores options of the command line, and one for ignored settings.

    A workload from outside that counts no costs gets a line, too.
    """
    ignored: dict[str, dict[str, None]] = {}
    for cell in cells:
        variant, workload = cell.job.variant, cell.job.workload.name
        for name in cell.ignored:
            sentence = f"{variant} has no {{}}: ignored"
            if name in cell.job.unused_settings:
                sentence = f"{workload} ignores {{}} where its problem fixes the iterations (steps=2 makes it short)"
            ignored.setdefault(sentence, {})[name] = None
    uncounted = {
        cell.job.workload.name: None
        for cell in cells
        if cell.job.workload.definition and not cell.job.workload.definition["costs"]
    }
    return [
        *(f"{workload} counts no costs, so its rows have no floor: declare them with .costs" for workload in uncounted),
        *(sentence.format(", ".join(names)) for sentence, names in ignored.items()),
    ]


def distinguish(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells with distinct texts.

    Cells whose jobs have the same text also show the fields that vary, such as seed or distribution.
    """
    flats = [cell.job.flat() for cell in cells]
    texts: list[tuple[object, ...]] = [(str(cell.job),) for cell in cells]
    distinguishing = []
    for name in dict.fromkeys(name for flat in flats for name in flat):
        values = [repr(flat.get(name)) for flat in flats]
        if len(set(zip(texts, values, strict=True))) > len(set(texts)):
            distinguishing.append(name)
            texts = [(*text, value) for text, value in zip(texts, values, strict=True)]
    return [
        replace(cell, distinguishing=tuple(name for name in distinguishing if name in flat))
        for cell, flat in zip(cells, flats, strict=True)
    ]


def sweep_options(requests: Sequence[Request]) -> SweepOptions:
    """Return the options of the whole sweep. Raises JobError if its jobs disagree on one."""
    parsed: list[SweepOptions] = [parse(SweepOptions, request.values) for request in requests]
    for each in fields(SweepOptions):
        if len({getattr(one, each.name) for one in parsed}) > 1:
            raise JobError(f"{each.name} is one setting for the whole sweep: it cannot be swept")
    options = parsed[0] if parsed else SweepOptions()
    if options.order == "interleaved" and not options.reuse:
        raise JobError(
            "order=interleaved needs reuse=true: the processes of interleaved cells stay alive between their rounds"
        )
    return options


def _shape_workloads(folders: tuple[Path, ...]) -> dict[str, str]:
    """Return the workload of every shape file, by the shape's name."""
    files = [each for folder in folders for each in (folder / "shape").glob("*.yaml")]
    return {each.stem: read_choice(each).get("shape_workload", "") for each in files}


CPU_START_S = 10.0
"""Seconds to start the processes of a job on a CPU, to import torch and to set up a small problem."""
CPU_CORE_S = 0.6e-6
"""Seconds of a CPU core for each element that a step works on, over all iterations: about 20 of a variant in torch, or
one in Triton's interpreter. Seen on two cores: 0.6 (pytorch_gather), 0.4 (pytorch_tp_manual, triton_tp)."""
LARGE_GIB = 0.125
"""A problem that needs more memory takes long on a CPU."""
LONG_S = 60.0
"""A cell that takes longer on a CPU than this is announced before a sweep."""


def seconds_on_cpu(job: Job) -> float | None:
    """Return about how long a job takes on the CPU, or None for a large problem whose work nobody has counted."""
    small_s = CPU_START_S + 2 * job.measure.time_budget_s
    if job.workload.cost_model is None:
        return small_s if (job.workload.least_gib(job) or 0.0) < LARGE_GIB else None
    cost_model = job.workload.cost_model()
    size = cost_model.size_of(job.flat())
    worked = sum(count for name, count in cost_model.counts(job.variant, size).time.items() if name.startswith("bytes"))
    elements = job.world_size * worked / ITEM_BYTES[job.problem.dtype]
    cores = min(available_cores(), job.world_size) if job.interpreted else available_cores()
    return max(small_s, CPU_START_S + CPU_CORE_S * elements / cores)


def takes_long_without_gpu(cell: Cell, target: PlanningTarget) -> bool:
    """Return True for a cell that is large for the CPU of a host without a GPU."""
    if not (cell.runs and target.device == "cpu" and isinstance(target, ThisHost)):
        return False
    seconds = None if cell.job.scheduled else seconds_on_cpu(cell.job)
    return seconds > LONG_S if seconds else (cell.job.workload.least_gib(cell.job) or 0.0) > LARGE_GIB


def tiny_shapes(requests: Sequence[Request]) -> dict[str, str]:
    """Return the name of a shape that runs in seconds on any machine, by workload."""
    shapes = sorted(_shape_workloads(tuple(requests[0].folders)).items(), reverse=True)
    return {workload: name for name, workload in shapes if name.startswith("tiny")}


class PlanningTarget(Protocol):
    """A host or a cluster that cells are planned for."""

    @property
    def device(self) -> Literal["cuda", "cpu"]:
        """The device that device=auto means on this target."""

    def nodes_of(self, job: Job) -> int:
        """Return the number of nodes that the job takes."""

    def skip_reason(self, job: Job) -> str | None:
        """Return why the target has too few GPUs or nodes for the job, or None if it has enough."""


MAX_RANKS_PER_CORE = 8
"""Most ranks of a job for each CPU core. With more, the job would mostly wait and its memory might not suffice."""


@dataclass(frozen=True)
class ThisHost:
    """The host that this process runs on."""

    gpus: int
    cores: int = field(default_factory=available_cores)

    @property
    def device(self) -> Literal["cuda", "cpu"]:
        return "cuda" if self.gpus else "cpu"

    def nodes_of(self, job: Job) -> int:
        return 1

    def skip_reason(self, job: Job) -> str | None:
        if job.device == "cuda" and job.world_size > self.gpus:
            return f"needs {job.world_size} GPUs, found {self.gpus}"
        if job.device == "cpu" and job.world_size > MAX_RANKS_PER_CORE * self.cores:
            most = f"a job on this machine may have at most {MAX_RANKS_PER_CORE * self.cores}"
            return f"{job.world_size} ranks would share {self.cores} CPU core{'s' * (self.cores > 1)}: {most}"
        return None


def invalid_reason(job: Job, target: PlanningTarget) -> str | None:
    """Return why the command line must change before this job can run, or None if it need not.

    The reasons are a combination that no machine can run, and too many ranks for the cores of this host.
    """
    on_this_cpu = isinstance(target, ThisHost) and job.device == "cpu"
    return unsupported_reason(job) or (target.skip_reason(job) if on_this_cpu else None)


def skip_reason(job: Job, target: PlanningTarget) -> str | None:
    """Return why the job cannot run on the target, or None if it can.

    Reasons are an unsupported combination, a missing package, and too few GPUs or nodes.
    """
    if reason := unsupported_reason(job):
        return reason
    if missing := [name for name in job.implementation.requires if not packages.installed(name)]:
        return packages.not_installed(missing)
    if reason := target.skip_reason(job):
        return reason
    if job.device == "cuda" and job.implementation.cpu_only_reason:
        return job.implementation.cpu_only_reason
    if job.device == "cpu" and job.requires_cuda:
        return "needs a CUDA GPU"
    if job.device == "cpu" and job.measure.graph:
        return "graph=true needs a CUDA GPU"
    return job.workload.unsupported_reason(job)
