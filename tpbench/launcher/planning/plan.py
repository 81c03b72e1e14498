"""The plan of a sweep: composed configurations become cells, and each cell either runs or is skipped for a reason."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from tpbench import packages
from tpbench.job import NOT_IN_KEY, UNUSED_IF_SCHEDULED, Job, parse_job, trait_of, unsupported_reason
from tpbench.launcher.command_line.outside_choices import user_files
from tpbench.launcher.options import SWEEP_OPTION_NAMES, SweepOptions
from tpbench.measure import machine
from tpbench.outside.variant import OutsideVariant
from tpbench.settings import JobError, parse, spelled


class PlanningTarget(Protocol):
    """A host, or a partition of a cluster, that cells are planned for."""

    @property
    def device(self) -> Literal["cuda", "cpu"]:
        """The device that device=auto means there."""

    def nodes_of(self, job: Job) -> int:
        """Return the number of nodes that the job takes."""
        return 1

    def skip_reason(self, job: Job) -> str | None:
        """Return why the target is too small for the job, or None if it isn't."""

    def memory_gib(self) -> tuple[float | None, float | None]:
        """Return the memory of one GPU, and the main memory that all ranks of a node share. None: unknown."""
        return None, None


@dataclass(frozen=True)
class Request:
    """One job as Hydra composed it."""

    index: int
    values: dict[str, Any]
    chosen: list[str]
    overrides: str = ""
    """Arguments of a command line, for a shell, that make this job."""


@dataclass(frozen=True)
class Cell:
    """One cell of a sweep."""

    index: int
    job: Job
    skip_reason: str | None
    label: str = ""
    """Text of the job, with the fields that distinguish this cell from others of the sweep."""
    ignored: tuple[str, ...] = ()
    """Options and settings that the command line set and that cannot change the cell."""
    overrides: str = ""

    def __str__(self) -> str:
        return self.label or str(self.job)


def plan(
    requests: Sequence[Request], target: PlanningTarget, outside: Mapping[str, OutsideVariant] | None = None
) -> list[Cell]:
    """Return a cell for each job. Raises JobError with every invalid value of all requests."""
    by_key: dict[str, Cell] = {}
    errors: list[str] = []
    for request in requests:
        try:
            if ".py:" in str(file := request.values.get("objective")) and file not in user_files:
                raise JobError(f"objective={file}: only a command line may name a file, as loss=FILE.py:NAME")
            job = parse_job(request.values, request.chosen, SWEEP_OPTION_NAMES, outside)
            if outside and "fresh" in request.chosen and not job.measure.fresh:
                raise JobError("fresh=false: inputs change for all variants of a sweep with one from outside tpbench")
        except JobError as error:
            errors += str(error).splitlines()
            continue
        if job.device == "auto":
            job = replace(job, device=target.device)
        if outside and not job.scheduled:  # inputs change for all variants alike, as they do for one from outside
            job = replace(job, measure=replace(job.measure, fresh=True))
        # Requests of the same job differ in an option that their variant does not have.
        cell = by_key.get(job.key) or Cell(request.index, job, skip_reason(job, target), overrides=request.overrides)
        if swept := [name for name in NOT_IN_KEY if getattr(job, name) != getattr(cell.job, name)]:
            errors.append(f"{swept[0]} doesn't make a job another one: run a sweep for each value of {swept[0]}")
        unused = UNUSED_IF_SCHEDULED if job.scheduled else frozenset()
        ignorable = (job.workload.ignorable_options - job.implementation.options) | unused
        ignored = dict.fromkeys([*cell.ignored, *filter(ignorable.__contains__, request.chosen)])
        by_key[job.key] = replace(cell, ignored=tuple(ignored))
    if errors:
        raise JobError("\n".join(dict.fromkeys(errors)))
    cells = list(by_key.values())
    invalid = [(cell.job.implementation.name, unsupported_reason(cell.job)) for cell in cells]
    if cells and all(reason for _, reason in invalid):
        # A sweep may have some pairs that cannot run: they are empty places in its table. Here no pair can run.
        lines = (f"{name}: {reason}".replace(f"{name}: {name} ", f"{name} ") for name, reason in invalid)
        raise JobError("\n".join(dict.fromkeys(lines)))
    return distinguish(cells)


def notes(cells: Sequence[Cell]) -> list[str]:
    """Return what a user should know before the cells run, a line each."""
    lines = []
    if any(is_long_on_cpu(cell.job) for cell in cells if cell.skip_reason is None):
        expected = "large cells run on the CPU: expect minutes or hours, and no measurement of a GPU"
        lines.append(f"{expected}; shapes whose names begin with tiny_ take seconds (python -m tpbench list shapes)")
    outside = [cell.job.variant for cell in cells if cell.job.outside]
    if 0 < len(outside) < len(cells):
        lines.append(f"inputs change before each iteration in all cells (fresh=true), because {outside[0]} is yours")
    lines += [f"{cell.job.variant} has no {', '.join(cell.ignored)}: ignored" for cell in cells if cell.ignored]
    return list(dict.fromkeys(lines))


def distinguish(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells with distinct labels, which show fields that vary, such as seed, where jobs have equal texts."""
    flats = [cell.job.flat() for cell in cells]
    labels = [str(cell.job) for cell in cells]
    for name in dict.fromkeys(name for flat in flats for name in flat):
        pairs = zip(labels, flats, strict=True)
        longer = [f"{label} {name}={spelled(flat[name])}" if name in flat else label for label, flat in pairs]
        if len(set(longer)) > len(set(labels)):
            labels = longer
    return [replace(cell, label=label) for cell, label in zip(cells, labels, strict=True)]


def sweep_options(requests: Sequence[Request]) -> SweepOptions:
    """Return the options of the whole sweep. Raises JobError if its jobs disagree on one."""
    parsed: set[SweepOptions] = {parse(SweepOptions, request.values) for request in requests}
    if swept := [name for name in sorted(SWEEP_OPTION_NAMES) if len({getattr(one, name) for one in parsed}) > 1]:
        raise JobError(f"{', '.join(swept)}: settings of the whole sweep cannot be swept")
    options = next(iter(parsed), SweepOptions())
    if options.order == "interleaved" and not options.reuse:
        raise JobError("order=interleaved needs reuse=true: interleaved cells share processes")
    if options.gpu and not options.dry_run:
        raise JobError(f"gpu={options.gpu} plans for another machine: it needs dry_run=true")
    return options


def is_long_on_cpu(job: Job) -> bool:
    """Return True if a job runs on this host's CPU, which takes about 300 s of a core for each GiB, and is large."""
    return job.device == "cpu" and (job.workload.least_gib(job) or 0.0) > 0.125


MAX_RANKS_PER_CORE = 8
"""Most ranks of a job for each CPU core. With more, the job would mostly wait and its memory might not suffice."""


@dataclass(frozen=True)
class ThisHost(PlanningTarget):
    """The host that this process runs on, or for a dry run one with other GPUs."""

    gpus: int
    cores: int = field(default_factory=machine.available_cores)
    gpu: str = ""

    @property
    def device(self) -> Literal["cuda", "cpu"]:
        return "cuda" if self.gpus else "cpu"

    def memory_gib(self) -> tuple[float | None, float | None]:
        from tpbench.predict.target import this_gpu  # with pandas

        if self.gpu:
            return machine.KNOWN_GPUS[self.gpu][0], None
        return (found := this_gpu()) and found[1], machine.memory_share_gib(1)

    def skip_reason(self, job: Job) -> str | None:
        if job.device == "cuda" and job.world_size > self.gpus:
            return f"needs {job.world_size} GPU{'s' * (job.world_size > 1)}, found {self.gpus}"
        if job.device == "cpu" and job.world_size > MAX_RANKS_PER_CORE * self.cores:
            most = f"a job on this machine may have at most {MAX_RANKS_PER_CORE * self.cores}"
            return f"{job.world_size} ranks would share {self.cores} CPU core{'s' * (self.cores > 1)}: {most}"
        return None


def skip_reason(job: Job, target: PlanningTarget) -> str | None:
    """Return why the job cannot run on the target, or None if it can."""
    if reason := unsupported_reason(job):
        return reason
    if missing := packages.missing(job.implementation.requires):
        return packages.not_installed(missing)
    if reason := target.skip_reason(job):
        return reason
    if job.device == "cuda" and job.implementation.cpu_only_reason:
        return job.implementation.cpu_only_reason
    if job.device == "cpu" and (trait_of(job.implementation.requires_cuda, job.problem) or job.measure.graph):
        return f"{'graph=true ' * job.measure.graph}needs a CUDA GPU"
    return job.workload.unsupported_reason(job)
