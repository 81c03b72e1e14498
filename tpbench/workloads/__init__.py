"""The workloads that can be measured, and how a workload and its variants are declared.

No module that this package imports uses torch: the launcher reads workloads to plan a sweep. A workload of this package
is a folder. Its `__init__` declares the problem's fields, the variants and the columns of a row. Its `bench` module,
which only ranks import, declares what runs on a rank as a user's file does. `operation` runs that.
"""

import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import Any, TypeVar

from tpbench.columns import Column, columns_of_fields, declared
from tpbench.measure.session import Context, Session
from tpbench.settings import defaults, field_traits, setting
from tpbench.suggestions import unknown

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

NAMES = ("entropy_loss", "linear_loss", "embedding_grad", "tp_block", "train_step")
"""The folders beside this file that hold a workload. A variant from outside that names none is of the first one."""

DTYPES = (
    "bfloat16", "float16", "float32", "float64",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip
"""The dtypes of floating point, which tolerances are for."""

_LOSS_TOLERANCE = {"bfloat16": 2e-2, "float16": 5e-3, "float32": 1e-4}


@dataclass(frozen=True)
class Variant:
    """One implementation of a workload's operation."""

    name: str
    summary: str
    """One line for users."""
    prepare: Callable[..., Any]
    """The implementation. Each workload defines its signature. It imports heavy modules when called, not before."""
    options: frozenset[str] = frozenset()
    """Names of the workload's `options` that this variant supports."""
    option_values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """The values of an ignorable option, if the variant has only these. It runs other values as the default."""
    requires: tuple[str, ...] = ()
    """Importable names of the packages without which the variant is skipped."""
    requires_cuda: bool | Callable[[Any], bool] = False
    """True if the variant is skipped on a CPU. May be a function of the problem, as may the next three."""
    no_graph_reason: str | Callable[[Any], str] = ""
    """Why an iteration cannot be captured in a CUDA graph. Empty if it can."""
    uses_triton: bool | Callable[[Any], bool] = False
    """True if the kernels run in Triton's interpreter on a CPU: such rows are marked `interpreted`."""
    unsupported_reason: Callable[[Any, int], str | None] = lambda problem, tp_size: None
    """Return why the variant cannot run a (valid) problem on tp_size ranks: its cell is skipped. None if it can."""
    cpu_only_reason: str = ""
    """Why the variant cannot run on GPUs. Empty if it can."""
    process_settings: str = ""
    """Settings of the whole process that the variant changes. No other job runs in its processes. Empty: none."""
    bytes_communicated: Callable[[Any, Any], int] | None = None
    """`(problem, rank)`: the bytes that a rank sends, if they aren't those of the workload's costs."""
    file: Path | None = None
    """The module of the implementation, if `prepare` only imports it: the kernels of this module are those that run."""
    place: tuple[str, int] | None = None
    """File and line of a function outside this package. None for a variant of this package."""


@dataclass(frozen=True)
class Pivot:
    """Layout of a workload's rows in a report. Names are columns of a row, or keys of `derived`.

    Other fields of the problem that vary become keys of the table's rows, and options of a variant parts of its column.
    """

    rows: tuple[str, ...] = ("tp_size",)
    """Keys of a table row: the problem's size."""
    sections: tuple[str, ...] = ("dtype",)
    """Keys that start a new table, beside the hardware."""
    derived: Mapping[str, Callable[[Mapping[str, Any]], Any]] = field(default_factory=dict)
    """Keys that are computed from a row."""
    implied: tuple[str, ...] = ()
    """Fields of the problem that follow from another key. They are left out, unless only they distinguish two rows."""
    loss_tolerance: Mapping[str, float] = field(default_factory=_LOSS_TOLERANCE.copy)
    """By dtype, the largest difference between losses of equal problems, over the larger of the loss and 1."""


@dataclass(frozen=True)
class Study:
    """A table with several numbers of each cell side by side, for a question that no single number answers."""

    question: str
    columns: tuple[str, ...] = ()
    """Columns that stand before those of the workload that name the study. Those that no row has are left out."""
    module: str = ""
    """Import path of a module that computes the study instead: `tables(rows)` returns a list of `tpbench.tables.Table`,
    `picture(rows)`, if there is one, a `study_data.Picture` or None. A row is a dictionary by column."""
    best_by: tuple[str, ...] = ()
    """Columns to compare a cell with the best one of its problem. The first that a row has is used."""
    compared_across: tuple[str, ...] = ()
    """Keys in which compared cells may differ, and options that do not divide the points of a picture."""
    axes: tuple[str, ...] = ()
    """Columns along x and y of the study's picture, a point for each cell. Empty: no picture, or the module's."""
    needs: str = ""
    """Column without which the study leaves a row out. Empty: it shows all rows of its workloads."""


_LATE = ("late_ms", "beside_alone_ms", "beside_ms")
LATE = Study("what does a late rank cost the others (late=true)?", _LATE, needs="late_ms")


@dataclass
class Workload:
    """A problem with an oracle and a count of its unavoidable bytes, FLOPs and communicated bytes.

    The methods that are decorators register its functions. A subclass may override what plans and describes a cell,
    from `resolve` to `document`.
    """

    problem: type
    """Frozen dataclass: the problem's fields, declared with `tpbench.settings.setting`. A field `seed` is added unless
    there is one. It may have a method `check(tp_size, dp_size)` that returns a list of complaints."""
    summary: str = ""
    """One line for users."""
    tolerances: Mapping[str, float] = field(default_factory=dict)
    """By dtype, the largest relative error of a correct output. Those of `operation` hold for the other dtypes."""
    name: str = ""
    """Name in rows. Empty: that of the problem's class in small letters, as `my_problem`."""
    columns: Iterable[Column] | Mapping[str, str] = ()
    """Results that only this workload's rows have. A user's file may give their names and meanings only."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names that a command line may use, each with the arguments that it stands for, `{}` being its value. Beside
    its alias an argument with `{}` is an error, and one without it replaces the alias's. See `SweepComposer`."""
    headline: tuple[str, ...] = ()
    """The problem fields that name a cell in a progress line. A field that is null or 0 is left out."""
    pivot: Pivot = Pivot()
    studies: Mapping[str, Study] = field(default_factory=dict)
    """By name, as `report.py --study` takes it."""
    former_fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields that the problem had once and that could not change a result, with their values in every job's key."""
    scheduled: bool | Callable[[Any], bool] = False
    """True if each iteration continues the one before, as many as the problem says: no stop rule applies, and cells
    cannot be interleaved. `session` runs them. May be a function of the problem."""
    definition: Mapping[str, Any] | None = None
    """What rows carry of a workload from outside this package (`definition`). None for one of this package."""
    functions: dict[str, Callable[..., Any]] = field(default_factory=dict)
    """The functions that the decorators declare, by the decorators' names."""
    prepared: type = object
    """The type that a variant's function returns, with `step`."""
    output: type = dict
    """The type that a step returns: with `reference` a dictionary of tensors."""
    variants: dict[str, Variant] = field(default_factory=dict)
    variant_class: type[Variant] = Variant
    """The class of its variants. A subclass has traits that only this workload reads."""

    def __post_init__(self) -> None:
        cls = self.problem
        if not (isinstance(cls, type) and is_dataclass(cls)):
            raise TypeError(f"Workload needs a frozen dataclass with the problem's fields, not {cls!r}")
        given = self.tolerances.items() if isinstance(self.tolerances, Mapping) else [("", None)]
        if not all(name in DTYPES and isinstance(limit, (int, float)) and limit >= 0 for name, limit in given):
            valid = f"(valid dtypes: {', '.join(DTYPES)})"
            raise TypeError(f'tolerances are by dtype, as {{"float32": 1e-5}}, not {self.tolerances!r} {valid}')
        self.name = self.name or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()
        if self.scheduled is not True:
            self.studies = {**self.studies, "late": LATE}
        if "seed" not in {field.name for field in fields(cls)}:
            seed = setting(0, help="seed of the inputs", low=0, high=2**31 - 1)
            self.problem = make_dataclass(cls.__name__, [("seed", int, seed)], bases=(cls,), frozen=True)

    @functools.cached_property
    def row_columns(self) -> tuple[Column, ...]:
        """The columns of the workload's rows: fields of the problem, then results."""
        return (*columns_of_fields(self.problem, typed=self.definition is None), *declared(self.columns))

    def column_types(self, *, of_variant: bool = False) -> dict[str, type]:
        """Return the types of the workload's results, or only of those that a variant may set."""
        return {column.name: column.type for column in declared(self.columns) if column.by_variant or not of_variant}

    def study_columns(self, study: str) -> tuple[str, ...]:
        """Return the columns of a study, in order."""
        shown = (column.name for column in declared(self.columns) if study in column.studies)
        return tuple(dict.fromkeys((*self.studies[study].columns, *shown)))

    @functools.cached_property
    def option_defaults(self) -> dict[str, Any]:
        """The default of each option: a field that only variants support that name it in their `options`."""
        values = defaults(self.problem)
        return {name: values[name] for name in field_traits(self.problem, "option")}

    @functools.cached_property
    def ignorable_options(self) -> frozenset[str]:
        """The options that a variant without them runs with the default."""
        return frozenset(name for name, what in field_traits(self.problem, "option").items() if what == "ignored")

    @functools.cached_property
    def graph_options(self) -> dict[str, Any]:
        """Values of options that a CUDA graph requires: defaults with `graph=true`, which labels leave out."""
        return field_traits(self.problem, "with_graph")

    @functools.cached_property
    def outside_key(self) -> dict[str, Any]:
        """The fields, present or former ones, that cannot change a result, each with its value in every job's key."""
        return {**self.former_fields, **field_traits(self.problem, "in_key")}

    def resolve(self, problem: Any, chosen: frozenset[str]) -> Any:
        """Return the problem with all values that its fields, `chosen` by a user, refer to. Raises JobError."""
        return problem

    def planned_columns(self, job: Any) -> Mapping[str, Any]:
        """Return the columns that follow from the job alone. Every row has them, also after a failure."""
        return {}

    def expected_memory(self, job: Any) -> str:
        """Return the expected memory of a rank as text, for the reason of a row that ran out of memory."""
        return ""

    def least_gib(self, job: Any) -> float | None:
        """Return the memory that a rank surely needs, such as that of its inputs, in GiB, or None if it is unknown."""
        return None

    def unsupported_reason(self, job: Any) -> str | None:
        """Return why this installation or the job's device cannot run a (valid) job with any variant, or None."""
        return None

    def document(self, row: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
        """Return a row as a JSON document that this workload's users know, with its file name, or None."""
        return None

    def inputs(self, function: FunctionT) -> FunctionT:
        """Register `(problem, rank) -> dict of tensors`: the inputs of a rank, from these two and `rank.seed` only."""
        return self._declare("inputs", function)

    def refresh(self, function: FunctionT) -> FunctionT:
        """Register `(problem, inputs, rank) -> None`: all ranks write inputs anew that follow from changed ones."""
        return self._declare("refresh", function)

    def reference(self, function: FunctionT) -> FunctionT:
        """Register `(problem, inputs, rank) -> dict of tensors`: the right outputs, in float64. May be collective."""
        return self._declare("reference", function)

    def check(self, output: type) -> Callable[[FunctionT], FunctionT]:
        """Register `(problem, inputs, output, rank) -> Verdict`, which compares a step's output of that type.

        It replaces a reference that would not fit into memory, or outputs that are no dictionary. All ranks call it,
        and return the same verdict. Inputs may then be of any type, and a variant may leave out the argument `rank`.
        """
        self.output = output
        return lambda function: self._declare("check", function)

    def costs(self, function: FunctionT) -> FunctionT:
        """Register `(problem, rank) -> Costs` or `(problem, inputs, rank) -> Costs`. Without it, rows have no floor."""
        return self._declare("costs", function)

    def step(self, prepared: type) -> Callable[[FunctionT], FunctionT]:
        """Register `(problem, inputs, prepared, rank) -> Step`: the iteration of what a variant's function returns, an
        object of the given type. Without it, that is a function without arguments or a `Step`. The step may name other
        inputs than the workload's, and its `restore` is never timed.
        """
        self.prepared = prepared
        return lambda function: self._declare("step", function)

    def details(self, function: FunctionT) -> FunctionT:
        """Register `(problem, inputs, session, rank) -> dict` of further `columns` of a correct row. All ranks call it.

        `session` has `step`, `restore`, `costs`, a `stopwatch`, and the `columns` measured so far.
        """
        return self._declare("details", function)

    def session(self, function: FunctionT) -> FunctionT:
        """Register `(problem, variant, rank) -> Session` for iterations that continue the one before, as training does.

        The session has a `schedule` and does everything itself, from `variant.prepare` on. Where `scheduled` holds, by
        default always, it replaces all other functions.
        """
        self.scheduled = self.scheduled or True
        return self._declare("session", function)

    def _declare(self, what: str, function: FunctionT) -> FunctionT:
        if what in self.functions:
            raise ValueError(f"{self.name} has two functions for its {what}")
        self.functions[what] = function
        return function

    def variant(self, summary: str = "", **traits: Any) -> Callable[[FunctionT], FunctionT]:
        """Register the decorated function as the variant of that name. `traits`: the fields of `Variant`."""
        valid = {field.name for field in fields(self.variant_class)} - {"name", "summary", "prepare", "place"}
        for trait in traits.keys() - valid:
            raise TypeError(unknown("argument of a variant", trait, sorted(valid)))

        def register(prepare: FunctionT) -> FunctionT:
            if not inspect.isfunction(inspect.unwrap(prepare)):  # its line is a part of messages
                raise TypeError(f"variant decorates a function (def), not {prepare!r:.60}")
            name = prepare.__name__
            if name in self.variants:
                raise ValueError(f"{self.name} has two variants called {name}")
            traits["options"] = frozenset(traits.get("options", ()))
            self.variants[name] = self.variant_class(name, summary, prepare, **traits)
            return prepare

        return register

    def variant_of(self, name: str, function: str, summary: str, **traits: Any) -> None:
        """Register a variant whose function, `MODULE.FUNCTION` of the workload's folder, is imported by ranks only."""
        module, _, attribute = function.rpartition(".")

        def prepare(problem: Any, inputs: Any) -> Any:
            return getattr(importlib.import_module(f"{__name__}.{self.name}.{module}"), attribute)(problem, inputs)

        prepare.__name__ = name
        file = Path(__file__).parent.joinpath(self.name, *module.split(".")).with_suffix(".py")
        self.variant(summary, file=file, **traits)(prepare)

    def set_up(self, problem: Any, variant: Variant, context: Context) -> Session:
        """Return the session of a cell on this rank. Collective."""
        importlib.import_module(self.bench_module)  # it may declare the functions
        operation = importlib.import_module(f"{__name__}.operation")
        scheduled = self.scheduled(problem) if callable(self.scheduled) else self.scheduled
        set_up: Callable[..., Session] = operation.scheduled_session if scheduled else operation.OperationSession
        return set_up(self, problem, variant, context)

    @property
    def bench_module(self) -> str:
        """The name of the module that a rank imports first. It imports torch and declares the workload's functions."""
        return f"{__name__}.{self.name}.bench" if self.name in NAMES else f"{__name__}.operation"


_registered: dict[str, Workload] = {}
"""Workloads from outside this package that this process knows, by name."""
_caches: list[Any] = []


def register(workload: Workload) -> None:
    """Add a workload from outside this package to those of this process, or replace the one of that name."""
    _registered[workload.name] = workload
    for cached in _caches:
        cached.cache_clear()


def cached_until_registered(function: FunctionT) -> FunctionT:
    """Cache the results of a function of all workloads, until another workload is registered."""
    _caches.append(functools.cache(function))
    return _caches[-1]  # type: ignore[no-any-return]


def workloads() -> dict[str, Workload]:
    """Return every workload by name: those of this package, then those that were registered."""
    return {name: importlib.import_module(f"{__name__}.{name}").WORKLOAD for name in NAMES} | _registered


def variants() -> dict[str, tuple[Workload, Variant]]:
    """Return every variant of this package by name, with its workload. Names are unique across workloads."""
    return {name: (owner, variant) for owner in workloads().values() for name, variant in owner.variants.items()}
