"""What can be measured: the workloads, their variants, and what each must say of itself.

Nothing here imports torch: the launcher reads this room to plan a sweep. A workload is a folder with two faces, its
`__init__` (what it is: the problem's fields, the variants, the columns it adds to a row) and its `bench` module (what
a rank does with it), which only the worker imports.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

NAMES = ("entropy_loss", "embedding_grad", "tp_block", "train_step")
"""The folders beside this file that hold a workload."""


@dataclass(frozen=True)
class Variant:
    """One implementation of a workload's operation."""

    name: str
    summary: str
    """One line for people."""
    prepare: Callable[..., Any]
    """The implementation. Its signature is the workload's; it imports what is heavy when called."""
    takes: frozenset[str] = frozenset()
    """Problem fields, among the workload's `options`, that this variant honours."""
    needs: tuple[str, ...] = ()
    """Importable names of packages without which it is skipped."""
    needs_cuda: bool | Callable[[Any], bool] = False
    """On a CPU it is skipped. Or a function of the problem that says whether."""
    cpu_only: str = ""
    """Why it cannot run on GPUs, or nothing."""
    no_graph: str = ""
    """Why its iterations cannot be captured in a CUDA graph, or nothing."""
    uses_triton: bool | Callable[[Any], bool] = False
    """Its kernels run in Triton's interpreter on a CPU: such rows are marked `interpreted`. Or a function of the
    problem that says whether."""
    refuses: Callable[[Any, int], str | None] = lambda problem, tp_size: None
    """Why it cannot do a (valid) problem over tp_size ranks, or None: the cell is skipped with that reason."""


@dataclass(frozen=True)
class Option:
    """A problem field that only some variants honour (they name it in `takes`)."""

    name: str
    neutral: Any
    """The value that means "not used"."""
    drop: bool = False
    """For a variant without it: true takes the neutral value silently, false skips the cell and says so."""


@dataclass(frozen=True)
class Pivot:
    """How a report lays out a workload's rows. Names are of a row's columns, or of `derived` ones.

    Beside these, whatever else of the problem varies gets a place of its own: a field that makes another problem one
    among the keys of a table row, an option of a variant one among the table's columns.
    """

    rows: tuple[str, ...] = ("tp_size",)
    """Keys of a table row: the problem's size."""
    sections: tuple[str, ...] = ("dtype",)
    """What makes a table of its own, beside the hardware."""
    derived: Mapping[str, Callable[[Mapping[str, Any]], Any]] = field(default_factory=dict)
    """Keys that are computed from a row."""
    implied: tuple[str, ...] = ()
    """Fields of the problem that a key says already: they get no place, unless nothing else tells two rows apart."""
    trajectories: Mapping[str, float] = field(default_factory=dict)
    """Columns with a number a step, in which equal problems must agree too: at the first step within the loss's
    tolerance, and by what that is multiplied with each step (1: it stays)."""
    loss_tolerance: Mapping[str, float] = field(
        default_factory=lambda: {"bfloat16": 2e-2, "float16": 5e-3, "float32": 1e-4}
    )
    """By dtype, how far the losses of equal problems may be apart, relative to the greater of the loss and 1."""


@dataclass(frozen=True)
class Study:
    """Several numbers of each cell side by side, for a question that no single one answers."""

    question: str
    shows: tuple[str, ...] = ()
    """Columns of a row, in order. Those that no row has are left out."""
    module: str = ""
    """Import path of a module that computes the study instead. Its `tables(rows)` returns `StudyTable`s, its
    `picture(rows)` a `Picture` or None (both of `study_data`). A row is a dictionary by column; missing is None."""
    over: str = ""
    """The option that it is about: a page shows the study where that has several values. Empty: always."""
    best: tuple[str, ...] = ()
    """The column by which cells are compared with the best of their problem: of these the first that a row has."""
    across: tuple[str, ...] = ()
    """Keys in which cells may differ and be compared all the same."""


@dataclass
class Workload:
    """A problem with an oracle and a count of what it cannot avoid doing."""

    name: str
    summary: str
    problem: type
    """Frozen dataclass: the problem's fields, built with `tpbench.settings.setting`. May have `check(tp_size, dp_size)`
    that returns a list of complaints."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Columns that only this workload's rows have: name to what it is, with its unit."""
    headline: tuple[str, ...] = ()
    """The problem fields that name a cell in a progress line."""
    options: tuple[Option, ...] = ()
    pivot: Pivot = Pivot()
    studies: Mapping[str, Study] = field(default_factory=dict)
    """By name, as `report.py --study` takes it."""
    resolve: Callable[[Any, frozenset[str]], Any] = lambda problem, chosen: problem
    """The problem with whatever its fields leave to be found elsewhere, such as in a file, given the names of those
    that a person set on the command line. Raises JobError."""
    beforehand: Callable[[Any], Mapping[str, Any]] = lambda job: {}
    """Columns that follow from the job alone: every row has them, whatever becomes of its cell."""
    needed: Callable[[Any], str] = lambda job: ""
    """What a job is expected to take of a rank's memory, for the reason of a row that is out of it."""
    hindrance: Callable[[Any], str | None] = lambda job: None
    """Why this installation, or the job's kind of device, cannot run a (valid) job whatever its variant, or None."""
    shares: tuple[str, ...] = ()
    """Those of its columns that are written as percentages."""
    metrics: Mapping[str, int] = field(default_factory=dict)
    """Those of its columns that a report can make a table of: 1 where more is better, -1 where less is, 0: neither."""
    document: Callable[[Mapping[str, Any]], tuple[str, dict[str, Any]] | None] = lambda row: None
    """A row as a JSON document with the name of its file, in a form that this workload's users know, or None."""
    scheduled: bool = False
    """Its problem says how many iterations are run, and each goes on from the last: nothing else decides when to stop,
    no graph replays one, and cells cannot take turns. Its sessions have a `Schedule`."""
    forgets: bool = False
    """Its own variants keep nothing in the process once their session is gone: a warm process may have the next job."""
    variants: dict[str, Variant] = field(default_factory=dict)

    def variant(self, summary: str, **traits: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register the decorated function as the variant of that name. `traits`: the fields of `Variant`."""

        def register(prepare: Callable[..., Any]) -> Callable[..., Any]:
            name = prepare.__name__
            if name in self.variants:
                raise ValueError(f"{self.name} has two variants called {name}")
            traits["takes"] = frozenset(traits.get("takes", ()))
            self.variants[name] = Variant(name, summary, prepare, **traits)
            return prepare

        return register

    @property
    def bench(self) -> ModuleType:
        """The module that a worker runs: `setup(problem, variant, context) -> Session`. Imports torch."""
        return importlib.import_module(f"{__name__}.{self.name}.bench")


def workloads() -> dict[str, Workload]:
    """Every workload by name."""
    return {name: importlib.import_module(f"{__name__}.{name}").WORKLOAD for name in NAMES}


def variants() -> dict[str, tuple[Workload, Variant]]:
    """Every variant by name, with its workload. Names are unique across workloads."""
    return {
        name: (workload, variant) for workload in workloads().values() for name, variant in workload.variants.items()
    }
