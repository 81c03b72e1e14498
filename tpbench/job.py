"""The job: one cell of a sweep, typed, validated and frozen. The one boundary that configuration crosses."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from tpbench.launcher.options import Conduct
from tpbench.settings import JobError, parse, setting, unknown
from tpbench.workloads import Variant, Workload, variants, workloads


@dataclass(frozen=True)
class Measure:
    """How long and how exactly to measure."""

    measure: str = setting("default", help="name of the settings")
    time_budget_s: float = setting(3.0, help="seconds each clock may take", low=0.0)
    min_iterations: int = setting(20, help="iterations before the interval may stop a clock", low=1)
    max_iterations: int = setting(1000, help="iterations after which a clock stops", low=1)
    precision: float = setting(0.01, help="wanted 95% interval of the median, as a share of it", low=0.0)
    graph: bool = setting(False, help="time the replay of a CUDA graph")


@dataclass(frozen=True)
class Job:
    """One cell: a variant, its problem, the mesh it runs on and how it is measured."""

    variant: str = setting(help="implementation")
    tp_size: int = setting(help="tensor-parallel ranks", low=1)
    dp_size: int = setting(1, help="data-parallel replicas", low=1)
    device: Literal["auto", "cuda", "cpu"] = setting("auto", help="where it runs; auto: cuda where there is a GPU")
    memory_limit_gib: float | None = setting(None, help="memory that a rank may use", low=0.001)
    timeout_s: float = setting(600.0, help="seconds after which the job is ended", low=1.0)
    output_dir: str = setting("outputs", help="folder for rows and logs")
    measure: Measure = setting(Measure(), help="how it is measured")
    problem: Any = setting(None, help="what is computed: the workload's own fields")

    @property
    def workload(self) -> Workload:
        return variants()[self.variant][0]

    @property
    def implementation(self) -> Variant:
        return variants()[self.variant][1]

    @property
    def uses_triton(self) -> bool:
        """Whether this job runs Triton kernels."""
        uses = self.implementation.uses_triton
        return uses(self.problem) if callable(uses) else uses

    @property
    def needs_cuda(self) -> bool:
        """Whether this job cannot run on a CPU."""
        needs = self.implementation.needs_cuda
        return needs(self.problem) if callable(needs) else needs

    @property
    def world_size(self) -> int:
        return self.tp_size * self.dp_size

    def flat(self) -> dict[str, Any]:
        """All fields by their flat names, as plain values."""
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("measure", "problem")}
        return {"workload": self.workload.name, **own, **asdict(self.measure), **asdict(self.problem)}

    @property
    def key(self) -> str:
        """Hash of the resolved job without what cannot change a result."""
        resolved = {name: value for name, value in self.flat().items() if name not in NO_PART_OF_A_RESULT}
        return hashlib.sha256(json.dumps(resolved, sort_keys=True).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={getattr(self.problem, name)}" for name in self.workload.headline)
        used = {each.name: getattr(self.problem, each.name) for each in self.workload.options}
        options = [
            f" {each.name}={used[each.name]}" for each in self.workload.options if used[each.name] != each.neutral
        ]
        replicas = f" dp_size={self.dp_size}" if self.dp_size > 1 else ""
        return f"{self.variant} {sizes} tp_size={self.tp_size}{replicas}{''.join(options)}"


NO_PART_OF_A_RESULT = ("output_dir", "timeout_s")
"""Fields that cannot change one: where rows go, when to give up."""
_PARTS = {"measure", "problem"}
RANKS = "world_size"
"""May be set beside a job's fields: how many ranks tp_size and dp_size must make."""


def field_names(workload: Workload | None = None) -> set[str]:
    """The flat names that a command line may set: of one workload's jobs, or of any."""
    problems = [each.problem for each in ([workload] if workload else workloads().values())]
    names = {each.name for cls in (Job, Measure, Conduct, *problems) for each in fields(cls)}
    unused = {each.name for each in fields(Measure)} if workload and workload.scheduled else set()
    return names - {"problem"} - unused | {RANKS}


def parse_job(values: Mapping[str, Any], chosen: Iterable[str] = (), shapes: Mapping[str, str] | None = None) -> Job:
    """The job that flat configuration values describe.

    `chosen`: names that the person set on the command line; one that this job's workload does not have is an error
    (a mere default of another workload's is not). `shapes`: known shape names to their workloads, for the message.
    Raises JobError with every complaint, a line each.
    """
    workload, variant = _variant(values)
    if (shape_of := values.get("shape_workload", workload.name)) != workload.name:
        fitting = sorted(shape for shape, owner in (shapes or {}).items() if owner == workload.name)
        raise JobError(
            f"variant={variant.name} is of the workload {workload.name}, the shape is of {shape_of} "
            f"(shapes that fit: {', '.join(fitting) or 'none'})"
        )
    chosen = tuple(chosen)
    job = _parsed(
        _with_ranks(values),
        workload,
        [
            unknown(f"field of {workload.name}", each, field_names(workload))
            for each in chosen
            if each not in field_names(workload)
        ],
    )
    problem = workload.resolve(_without_dropped_options(workload, variant, job.problem), frozenset(chosen))
    job = replace(job, problem=problem)
    if complaints := job.problem.check(job.tp_size, job.dp_size):
        raise JobError("\n".join(complaints))
    return job


def stored_job(flat: Mapping[str, Any]) -> Job:
    """The job whose `flat` this was. What that was resolved from (a model's folder) may be gone by now, or another: it
    is not looked at. Raises JobError where this version of tpbench has no such job."""
    workload, _ = _variant(flat)
    return _parsed(flat, workload)


def _variant(values: Mapping[str, Any]) -> tuple[Workload, Variant]:
    if (name := values.get("variant")) not in variants():
        raise JobError(unknown("variant", name, variants()))
    return variants()[str(name)]


def _parsed(values: Mapping[str, Any], workload: Workload, complaints: Iterable[str] = ()) -> Job:
    """The job that these values say as they stand. Raises JobError with the complaints there are already, and one for
    each value that cannot be."""
    complaints = list(complaints)
    parts: dict[str, Any] = {}
    for part, cls in (("measure", Measure), ("problem", workload.problem), ("job", Job)):
        try:
            parts[part] = parse(
                cls, {key: value for key, value in values.items() if part != "job" or key not in _PARTS}
            )
        except JobError as error:
            complaints += str(error).splitlines()
    if complaints:
        raise JobError("\n".join(complaints))
    job: Job = replace(parts["job"], measure=parts["measure"], problem=parts["problem"])
    return job


def _with_ranks(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """tp_size=auto as what dp_size leaves of world_size. Where world_size is given it must be what the others make."""
    tp_size, dp_size, world_size = (values.get(name) for name in ("tp_size", "dp_size", "world_size"))
    if world_size is None:
        if tp_size == "auto":
            raise JobError("tp_size=auto needs world_size=RANKS, of which it takes what dp_size leaves")
        return values
    try:
        ranks, replicas = int(world_size), int(1 if dp_size is None else dp_size)
        tensor = ranks // replicas if tp_size == "auto" else int(str(tp_size))
    except (ValueError, ZeroDivisionError):
        raise JobError(f"world_size={world_size} tp_size={tp_size} dp_size={dp_size} must be numbers above 0") from None
    if tensor * replicas != ranks:
        raise JobError(f"dp_size={replicas} x tp_size={tp_size} does not make world_size={ranks} ranks")
    return {**values, "tp_size": tensor}


def _without_dropped_options(workload: Workload, variant: Variant, problem: Any) -> Any:
    unused = {each.name: each.neutral for each in workload.options if each.drop and each.name not in variant.takes}
    return replace(problem, **unused)


def refusal(job: Job) -> str | None:
    """Why the job's variant cannot do what the (valid) job asks on any machine, or None."""
    variant = job.implementation
    for option in job.workload.options:
        value = getattr(job.problem, option.name)
        if option.name not in variant.takes and value != option.neutral:
            takers = [each.name for each in job.workload.variants.values() if option.name in each.takes]
            return f"{variant.name} does not take {option.name}={value} (taken by: {', '.join(takers)})"
    if job.measure.graph and variant.no_graph:
        return f"{variant.name} cannot be captured in a CUDA graph: {variant.no_graph}"
    return variant.refuses(job.problem, job.tp_size)
