"""A variant from outside this package: where it is, what it declares, and how a rank loads it.

The launcher parses the file. Only ranks, and the process that describes a workload of the file, run it.
"""

import ast
import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from tpbench.outside import source
from tpbench.settings import JobError
from tpbench.suggestions import unknown
from tpbench.workloads import NAMES, Variant, Workload, workloads
from tpbench.workloads.definition import known

KINDS: Mapping[str, type | tuple[type, ...]] = {
    "summary": str,
    "workload": str,
    "options": (tuple, list, set),
    "requires": (tuple, list, set),
    "requires_cuda": bool,
    "cpu_only_reason": str,
    "no_graph_reason": str,
    "process_settings": str,
    "uses_triton": (bool, type(None)),
}
"""The arguments of `variant` that the launcher reads, with their types."""


def require_kinds(declared: Mapping[str, Any], place: str) -> None:
    """Raise JobError, which names the place, for an argument that `variant` lacks, and for a value of a wrong type."""
    for argument, value in declared.items():
        if argument not in KINDS:
            raise JobError(f"{place}: {unknown('argument of @variant', argument, [*KINDS, 'unsupported_reason'])}")
        texts = not isinstance(value, (tuple, list, set)) or all(isinstance(item, str) for item in value)
        if not isinstance(value, KINDS[argument]) or not texts:
            raise JobError(f"{place}: {argument}={value!r:.40} of @variant has the wrong type")


@dataclass(frozen=True)
class OutsideVariant:
    """A function of a file, as the launcher found it. All values are plain: a task has them."""

    name: str
    """The name in rows and tables: FILE.py:FUNCTION."""
    workload: str = NAMES[0]
    path: str = ""
    """Absolute path of the file. Empty: only a row names the variant, so it cannot be loaded."""
    function: str = ""
    line: int = 0
    """Line of the function."""
    version: str = ""
    """Hash of the file and of the files beside it that it imports."""
    declared: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Fields of `Variant`."""
    definition: Mapping[str, Any] | None = field(default=None, hash=False)
    """The workload's definition, if the file declares it. None: the workload is one of this package."""

    @property
    def of_workload(self) -> Workload:
        return known(self.definition) if self.definition else workloads()[self.workload]

    @functools.cached_property
    def variant(self) -> Variant:
        """The variant. Its function loads the code when a rank calls it."""
        declared = {"summary": "", **self.declared, "options": frozenset(self.declared.get("options", ()))}
        return Variant(
            self.name,
            prepare=lambda problem, inputs: self.load()(problem, inputs),
            place=(self.path, self.line),
            **{**declared, "requires": tuple(self.declared.get("requires", ()))},
        )

    @property
    def files(self) -> tuple[Path, ...]:
        """The file with the function and the files beside it that it imports."""
        return tuple(source.parsed_files(Path(self.path)))

    def refusal(self, problem: Any, tp_size: int, dp_size: int = 1) -> str | None:
        """Load the code and return why it refuses the problem, or None. Only ranks call this."""
        if self.definition is None:
            reason = getattr(self.load(), source.REFUSAL, None)
            return reason and reason(problem, tp_size)
        _, variant, problem = self.loaded(problem)
        complaint = _complaint(problem, tp_size, dp_size) if hasattr(problem, "check") else None
        return complaint or variant.unsupported_reason(problem, tp_size)

    def loaded(self, problem: Any) -> tuple[Workload, Variant, Any]:
        """Load the code and return the workload and the variant with their functions, and the problem as its own class.

        Only ranks call this. A workload of this package stays as it is, and so does its problem.
        """
        if self.definition is None:
            return self.of_workload, self.variant, problem
        workload = workloads_of(load_module(Path(self.path), self.version))[self.workload]
        variant = replace(workload.variants[self.function], name=self.name, place=(self.path, self.line))
        return workload, variant, workload.problem(**asdict(problem))

    def load(self) -> Callable[..., Any]:
        """Load the code and return the function. Only ranks call this.

        Raises RuntimeError if the file has changed since the sweep began, and whatever the file raises.
        """
        function: Callable[..., Any] = getattr(load_module(Path(self.path), self.version), self.function)
        return function


def _complaint(problem: Any, tp_size: int, dp_size: int) -> str | None:
    """Return the first complaint of a user's problem: its `check` may return one, a list or a generator, or None."""
    from tpbench.workloads.step import WrongReturn

    complaints = problem.check(tp_size, dp_size)
    if complaints is None or isinstance(complaints, str):
        return complaints or None
    found = list(complaints) if isinstance(complaints, Iterable) else [complaints]
    if not all(isinstance(complaint, str) for complaint in found):
        raise WrongReturn(type(problem).check, f"check must return complaints, a list of str, not {complaints!r:.60}")
    return found[0] if found else None


_imported_files: dict[Path, Path] = {}
"""Files that files of variants import in this process, by their paths relative to the variant's folder."""


@functools.cache
def load_module(path: Path, version: str) -> ModuleType:
    """Run a file of that version, and return its module.

    Raises RuntimeError if the file has changed, or if a file of another variant hides one that this file imports.
    """
    if source.version(path) != version:
        raise RuntimeError(f"{path.name} changed after the sweep began: run it again with resume=true")
    for file in source.parsed_files(path).keys() - {path}:
        name = file.relative_to(path.parent)
        if _imported_files.setdefault(name, file) != file:
            others = f"another variant in this process imports a {name} from another folder"
            raise RuntimeError(f"{path.name} imports {name}, and {others}: rename one, or run them in two sweeps")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last: a file beside it must not hide the standard library
    module = ModuleType(f"tpbench_file_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # as dataclasses and pickle expect
    # Not through importlib: bytecode of an older file of the same second and size would count as this file's.
    exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    return module


def workloads_of(module: ModuleType) -> dict[str, Workload]:
    """Return the workloads among the globals of a module, by name. Raises ValueError if two have one name."""
    found = {id(value): value for value in vars(module).values() if isinstance(value, Workload)}.values()
    by_name = {workload.name: workload for workload in found}
    if len(by_name) < len(found):
        raise ValueError(f"two workloads have one name: write Workload(..., name=...) ({', '.join(by_name)})")
    return by_name


def from_file(path: Path, function: str) -> OutsideVariant:
    """Return the variant `path:function`. Raises JobError in one line if the file cannot be used."""
    path = path.resolve()
    functions, version, definition = source.functions(path), source.version(path), None
    described = _described(path, version) if source.declares_workload(path) else []
    matches = [(definition, declared[function]) for definition, declared in described if function in declared]
    if len(matches) > 1:
        owners = " and of ".join(definition["name"] for definition, _ in matches)
        raise JobError(f"{path.name}: {function} is a variant of {owners}: rename one of the functions")
    if matches:
        ((definition, declared),) = matches
        workload, line = definition["name"], declared.pop("line")
    elif described and (function not in functions or source.declaration(functions[function], path) is None):
        raise JobError(unknown(f"variant in {path.name}", function, [name for _, names in described for name in names]))
    else:
        declared = _declared(path, function, functions)
        workload, line = declared.pop("workload", NAMES[0]), functions[function].lineno
    if matches or declared.get("uses_triton") is None:
        declared["uses_triton"] = bool(declared.get("uses_triton")) or source.uses_triton(path)
    name = f"{path.name}:{function}"
    return OutsideVariant(name, workload, str(path), function, line, version, declared, definition)


def names_in(path: Path) -> list[str]:
    """Return what may stand behind `path:` on a command line. Raises JobError."""
    path = path.resolve()
    if source.declares_workload(path):
        return [name for _, declared in _described(path, source.version(path)) for name in declared]
    return [name for name in source.functions(path) if not name.startswith("_")]


@functools.cache
def _description(path: Path, version: str) -> str:
    """Return what `tpbench.outside.describe` prints of a file, which it runs in a process of its own."""
    command = [sys.executable, "-m", "tpbench.outside.describe", str(path), version]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        raise JobError(f"{path.name} still runs after 120 s: its top level must only declare") from None
    *_, last = ["", *ended.stdout.splitlines()]
    if ended.returncode or not last.startswith("{"):
        lines = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
        raise JobError(f"{path.name} cannot be loaded: {lines[-1]}")
    return last


def _described(path: Path, version: str) -> list[tuple[dict[str, Any], dict[str, dict[str, Any]]]]:
    """Return the definition of each workload of a file, with its variants by name. Raises JobError."""
    described = json.loads(_description(path, version))
    if error := described.get("error"):
        raise JobError(error)
    return [(each["definition"], each["variants"]) for each in described["workloads"]]


def _declared(path: Path, name: str, functions: Mapping[str, ast.FunctionDef]) -> dict[str, Any]:
    """Return what a function of two arguments declares. Raises JobError, also for what `variant` does not have."""
    if name not in functions:
        public = ", ".join(name for name in functions if not name.startswith("_"))
        raise JobError(f"{path.name} has no function {name} (its functions: {public or 'none'})")
    function, arguments = functions[name], functions[name].args
    place = f"{path.name}:{function.lineno}"
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    too_few = len(positional) < 2 and arguments.vararg is None
    if too_few or len(positional) - len(arguments.defaults) > 2 or None in arguments.kw_defaults:
        example = f"{name}(problem, shard), not ({', '.join(positional)})"
        raise JobError(f"{place}: {name} must take two arguments, as {example}")
    declared = source.declaration(function, path) or {}
    require_kinds(declared, place)
    if (workload := declared.get("workload", NAMES[0])) not in workloads():
        raise JobError(f"{place}: {unknown('workload', workload, workloads())}")
    for option in declared.get("options", ()):
        if option not in (valid := workloads()[workload].option_defaults):
            raise JobError(f"{place}: {unknown(f'option of {workload}', option, valid)}")
    several = {argument: sorted(declared.get(argument, ())) for argument in ("options", "requires")}
    summary = (ast.get_docstring(function) or "").partition("\n")[0]
    return {**declared, **several, "summary": declared.get("summary") or summary}
