"""The job: one cell of a sweep, typed, validated and frozen.

Configuration becomes a `Job` here and nowhere else.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from types import SimpleNamespace
from typing import Any, Literal

from tpbench.measure.kernels_version import kernels_version
from tpbench.measure.machine import visible_gpus
from tpbench.measure.session import Context, MeasureSettings, Session
from tpbench.outside.loading import function_of
from tpbench.outside.variant import OutsideVariant
from tpbench.packages import versions
from tpbench.settings import JobError, defaults, parse, setting, spelled, user_path
from tpbench.suggestions import unknown
from tpbench.workloads import Variant, Workload, cached_until_registered, variants, workloads


@dataclass(frozen=True)
class Job:
    """One cell: a variant, its problem, the mesh it runs on and how it is measured."""

    variant: str = setting(help="implementation")
    tp_size: int = setting(help="tensor-parallel ranks", low=1)
    dp_size: int = setting(1, help="data-parallel replicas, each with its own tokens", low=1)
    device: Literal["auto", "cuda", "cpu"] = setting("auto", help="device of the ranks; auto: cuda if there is a GPU")
    memory_limit_gib: float | None = setting(
        None,
        help="memory that a rank may use; null: all of a GPU, or its share of a CPU machine's free memory",
        low=0.001,
    )
    timeout_s: float = setting(600.0, help="seconds after which the job is ended; its row then says `timeout`", low=1.0)
    output_dir: str = setting("outputs", help="folder for rows (in rows/) and logs (in sweeps/)")
    measure: MeasureSettings = setting(MeasureSettings(), help="settings of the measurement")
    problem: Any = setting(None, help="the workload's own fields")
    outside: OutsideVariant | None = setting(None, help="the variant, if it is not one of this package")

    @property
    def workload(self) -> Workload:
        return self.outside.of_workload if self.outside else variants()[self.variant][0]

    @property
    def implementation(self) -> Variant:
        return self.outside.variant if self.outside else variants()[self.variant][1]

    def set_up(self, context: Context) -> Session:
        """Return the variant set up on this rank. Only ranks call this. Collective."""
        workload, variant, problem = self.workload, self.implementation, self.problem
        if objective := getattr(problem, "objective", None):
            problem = replace(problem, objective=function_of(objective))
        if self.outside:
            workload, variant, problem = self.outside.loaded(problem)
        return workload.set_up(problem, variant, context)

    @property
    def uses_triton(self) -> bool:
        """True if this job runs Triton kernels."""
        return bool(trait_of(self.implementation.uses_triton, self.problem))

    @property
    def kernels_version(self) -> str | None:
        """Version of the kernels of tpbench that this job runs, or None if it runs none."""
        files = self.outside.files if self.outside else filter(None, [self.implementation.file])
        return kernels_version(tuple(files)) if self.uses_triton else None

    @property
    def software(self) -> dict[str, str | None]:
        """Columns of the versions that can change this job's result, beside torch's and triton's."""
        return {
            "kernels_version": self.kernels_version,
            "variant_version": self.outside.version if self.outside else None,
            "package_versions": versions(self.implementation.requires),
        }

    @property
    def interpreted(self) -> bool:
        """True if this job's Triton kernels run in Triton's interpreter."""
        return self.device == "cpu" and self.uses_triton

    @property
    def scheduled(self) -> bool:
        """True if the problem fixes the number of iterations."""
        return bool(trait_of(self.workload.scheduled, self.problem))

    @property
    def world_size(self) -> int:
        return self.tp_size * self.dp_size

    def flat(self) -> dict[str, Any]:
        """Return all fields under their flat names, as plain values."""
        job_fields = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _PARTS}
        return {"workload": self.workload.name, **job_fields, **asdict(self.measure), **asdict(self.problem)}

    @property
    def key(self) -> str:
        """Hash of the resolved job, without the fields that cannot change a result."""
        return key_of(self.flat())

    def __str__(self) -> str:
        headline = {name: getattr(self.problem, name) for name in self.workload.headline}
        sizes = " ".join(f"{name}={spelled(value)}" for name, value in headline.items() if value not in (None, 0))
        options = "".join(f" {name}={spelled(value)}" for name, value in self.chosen_options().items())
        replicas = f" dp_size={self.dp_size}" if self.dp_size > 1 else ""
        return f"{self.variant} {sizes} tp_size={self.tp_size}{replicas}{options}"

    def chosen_options(self) -> dict[str, Any]:
        """Return the options of the variant whose value is not the default."""
        used = {name: getattr(self.problem, name) for name in self.workload.option_defaults}
        return {name: value for name, value in used.items() if value != self.workload.option_defaults[name]}


NOT_IN_KEY = ("output_dir", "timeout_s")
"""Fields that cannot change a result: where rows go, and when to give up."""
_FORMER = {"profiler": None}
"""Settings that a measurement had once, each with its value in every job's key."""
_PARTS = ("measure", "problem", "outside")
"""Fields that hold fields of their own."""
_MEASURE_DEFAULTS = defaults(MeasureSettings)
_STOP_RULE = _MEASURE_DEFAULTS.keys() - {"graph", "profile"}
"""Settings of a measurement that a workload with a fixed number of iterations doesn't have."""
UNUSED_IF_SCHEDULED = frozenset(_STOP_RULE - {"fresh"})
"""Settings that a workload with a fixed number of iterations ignores. It refuses `fresh`."""


def field_names(workload: Workload) -> set[str]:
    """Return the flat names of the fields of a workload's jobs, and `world_size`."""
    names = {field.name for cls in (Job, MeasureSettings, workload.problem) for field in fields(cls)}
    unused = _STOP_RULE if workload.scheduled is True else set()
    return names - {"problem", "outside"} - unused | {"world_size"}


@cached_until_registered
def field_defaults(workload: str) -> dict[str, Any]:
    """Return the default of each field of this workload's jobs, under its flat name. A field may have none."""
    values = defaults(Job) | defaults(MeasureSettings) | defaults(workloads()[workload].problem)
    return {name: value for name, value in values.items() if name not in ("problem", "outside")}


def key_of(flat: Mapping[str, Any]) -> str:
    """Return the key of the job that `Job.flat` described, by this or another version of tpbench.

    A field that the description lacks counts as its default. A field that this version does not have stays in the key:
    no job of this version is equal to such a job. Settings that the job ignores are hashed with their defaults. Raises
    KeyError if the job's workload does not exist.
    """
    values = {**_FORMER, **field_defaults(flat["workload"]), **flat}
    if trait_of(workloads()[flat["workload"]].scheduled, SimpleNamespace(**values)):
        values |= {name: _MEASURE_DEFAULTS[name] for name in UNUSED_IF_SCHEDULED}
    values |= workloads()[flat["workload"]].outside_key
    for name in NOT_IN_KEY:
        del values[name]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def parse_job(
    values: Mapping[str, Any],
    chosen: Iterable[str] = (),
    also_valid: Collection[str] = (),
    outside: Mapping[str, OutsideVariant] | None = None,
) -> Job:
    """Return the job that flat configuration values describe: plain ones, or strings as a command line has them.

    `chosen`: names that the user set on the command line. One that this job's workload does not have is an error,
    unless it is among `also_valid`, the options of a whole sweep. `outside`: variants from outside this package.
    Raises JobError with every complaint, one per line.
    """
    from_outside = (outside or {}).get(str(values.get("variant")))
    workload, variant = _variant(values, from_outside)
    if (shape_of := values.get("shape_workload", workload.name)) != workload.name:
        if shape_of not in workloads():
            raise JobError(f"shape_workload={shape_of}: {unknown('workload', shape_of, workloads())}")
        advice = f"python -m tpbench list {workload.name} shows its shapes"
        if from_outside:
            advice = f'write its fields as NAME=VALUE, or for a variant of {shape_of} @variant(workload="{shape_of}")'
        what = f"variant={variant.name} is of the workload {workload.name}, and the shape is of {shape_of}"
        raise JobError(f"{what}: {advice}")
    chosen = dict.fromkeys(chosen)
    valid = field_names(workload).union(also_valid)
    complaints = [_no_such_field(workload, variant, name, valid) for name in chosen if name not in valid]
    job = _parsed(_with_ranks(values), workload, complaints, from_outside)
    # Options that this variant ignores get their defaults, so that equal jobs have equal keys.
    ignored = workload.ignorable_options - variant.options
    ignored |= {name for name, valid in variant.option_values.items() if getattr(job.problem, name) not in valid}
    options = {name: workload.option_defaults[name] for name in ignored}
    if job.measure.graph:
        required = workload.graph_options.items()
        options |= {name: value for name, value in required if name in variant.options and name not in chosen}
    job = replace(job, problem=workload.resolve(replace(job.problem, **options), frozenset(chosen)))
    fewest, most = job.measure.min_iterations, job.measure.max_iterations
    if fewest > most and "min_iterations" in chosen:  # max_iterations alone limits the default of the other, too
        raise JobError(f"min_iterations={fewest} must be at most max_iterations={most}")
    return job


def stored_job(flat: Mapping[str, Any], outside: OutsideVariant | None = None) -> Job:
    """Return the job that `Job.flat` described, whose variant is `outside` if it is not one of this package.

    Files that the job was resolved from, such as a model's folder, are not read: they may have changed since. Raises
    JobError if this version of tpbench has no such job.
    """
    workload, _ = _variant(flat, outside)
    return _parsed(flat, workload, (), outside)


def _no_such_field(workload: Workload, variant: Variant, name: str, valid: Collection[str]) -> str:
    """Return the complaint about a name that jobs of this workload do not have."""
    if others := [other.name for other in workloads().values() if name in field_names(other)]:
        return f"no field of {workload.name} is called {name}: leave it out (it is a field of {', '.join(others)})"
    topic = f"variant={variant.name}" if workload.definition else workload.name
    return unknown(f"field of {workload.name}", name, {*valid, "shape", "variant"}, f"python -m tpbench list {topic}")


def trait_of(trait: Any, problem: Any) -> Any:
    """Return a trait of a variant or workload that may be a function of the problem."""
    return trait(problem) if callable(trait) else trait


def _variant(values: Mapping[str, Any], outside: OutsideVariant | None) -> tuple[Workload, Variant]:
    if outside is not None:
        return outside.of_workload, outside.variant
    if (name := str(values.get("variant"))) not in variants():
        if ".py:" in name:
            raise JobError(f"variant={name}: only the command line may name a file, not a configuration file or a row")
        raise JobError(unknown("variant", name, variants()))
    return variants()[name]


def _parsed(
    values: Mapping[str, Any], workload: Workload, complaints: Iterable[str], outside: OutsideVariant | None
) -> Job:
    """Return the job with exactly these values. Raises JobError with the complaints and one for each invalid value."""
    complaints = list(complaints)
    parts: dict[str, Any] = {}
    of_job = {name: value for name, value in values.items() if name not in _PARTS}  # MeasureSettings has a `measure`
    for part, cls in (("measure", MeasureSettings), ("problem", workload.problem), ("job", Job)):
        try:
            parts[part] = parse(cls, of_job if cls is Job else values)
        except JobError as error:
            complaints += str(error).splitlines()
    if complaints:
        raise JobError("\n".join(complaints))
    job: Job = parts.pop("job")
    return replace(job, **parts, output_dir=str(user_path(job.output_dir, "output_dir")), outside=outside)


def _with_ranks(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace tp_size=auto by world_size / dp_size. Check that a given world_size is equal to tp_size x dp_size.

    Without a world_size, `auto` means all visible GPUs of this host.
    """
    tp_size, dp_size, world_size = (values.get(name) for name in ("tp_size", "dp_size", "world_size"))
    if world_size is None and tp_size != "auto":
        return values
    if world_size is None and not (world_size := len(visible_gpus())):
        raise JobError("tp_size=auto needs world_size=N where no GPU is visible; it is then N / dp_size")
    try:
        ranks, replicas = int(world_size), int(1 if dp_size is None else dp_size)
        tensor = ranks // replicas if tp_size == "auto" else int(str(tp_size))
    except (TypeError, ValueError, ZeroDivisionError):
        raise JobError(f"world_size={world_size} tp_size={tp_size} dp_size={dp_size} must be numbers above 0") from None
    if tensor * replicas != ranks:
        raise JobError(f"world_size={ranks} must be dp_size x tp_size, and not {replicas} x {tp_size}")
    return {**values, "tp_size": tensor}


def unsupported_reason(job: Job) -> str | None:
    """Return why the job's fields don't fit together, or why its variant cannot run it on any machine, or None."""
    variant = job.implementation
    if complaints := job.problem.check(job.tp_size, job.dp_size):
        return "; ".join(complaints)
    for name, value in job.chosen_options().items():
        if name not in variant.options:
            others = [other.name for other in job.workload.variants.values() if name in other.options]
            return f"{variant.name} does not support {name}={spelled(value)} (supported by: {', '.join(others)})"
    if job.measure.fresh and job.scheduled:
        return f"fresh=true has no meaning for this {job.workload.name}: each iteration continues the one before"
    if job.measure.graph and (reason := trait_of(variant.no_graph_reason, job.problem)):
        return f"{variant.name} cannot be captured in a CUDA graph: {reason}"
    return variant.unsupported_reason(job.problem, job.tp_size)
