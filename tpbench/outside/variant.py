"""A variant from outside this package: where it is, what it declares, and how a rank loads it.

An installed package has variants as entry points of the group `tpbench.variants`. No package is imported here.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from tpbench.outside import source
from tpbench.settings import JobError
from tpbench.suggestions import unknown
from tpbench.workloads import Variant, Workload, variants, workloads

GROUP = "tpbench.variants"

_KINDS: Mapping[str, type | tuple[type, ...]] = {
    "summary": str,
    "workload": str,
    "options": (tuple, list, set),
    "requires": (tuple, list, set),
    "requires_cuda": bool,
    "cpu_only_reason": str,
    "no_graph_reason": str,
    "uses_triton": (bool, type(None)),
}
"""The arguments of `variant` that the launcher reads, with their types."""


@dataclass(frozen=True)
class OutsideVariant:
    """A function of a file or of an installed module, as the launcher found it. All values are plain: a task has
    them."""

    name: str
    """The name in rows and tables: FILE.py:FUNCTION, or the name of the entry point."""
    path: str
    """Absolute path of the file."""
    module: str
    """Name of the installed module. Empty for a file."""
    function: str
    line: int
    """Line of the function."""
    version: str
    """Hash of the file and of the files beside it that it imports, or of the installed package's files."""
    workload: str = "entropy_loss"
    summary: str = ""
    options: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    requires_cuda: bool = False
    cpu_only_reason: str = ""
    no_graph_reason: str = ""
    uses_triton: bool = False

    @property
    def of_workload(self) -> Workload:
        return workloads()[self.workload]

    @functools.cached_property
    def variant(self) -> Variant:
        """The variant. Its function loads the code when a rank calls it."""
        return Variant(
            self.name,
            self.summary,
            lambda problem, inputs: self.load()(problem, inputs),
            options=frozenset(self.options),
            requires=self.requires,
            requires_cuda=self.requires_cuda,
            cpu_only_reason=self.cpu_only_reason,
            no_graph_reason=self.no_graph_reason,
            uses_triton=self.uses_triton,
            place=(self.path, self.line),
        )

    @property
    def files(self) -> tuple[Path, ...]:
        """The file with the function and the files beside it that it imports, or the installed package's files."""
        return tuple(_files(Path(self.path), self.module))

    def plain(self) -> dict[str, Any]:
        """Return the fields as JSON can store them."""
        return asdict(self)

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> OutsideVariant:
        """Return the variant that `plain` described. Nothing is loaded."""
        return cls(**{**values, "options": tuple(values["options"]), "requires": tuple(values["requires"])})

    @classmethod
    def named(cls, name: str, workload: str) -> OutsideVariant:
        """Return a variant of which a stored row has the name. It cannot be loaded."""
        return cls(name, "", "", "", 0, "", workload)

    def refusal(self, problem: Any, tp_size: int) -> str | None:
        """Load the code and return why the function refuses the problem, or None. Only ranks call this."""
        return source.refusal(self.load(), problem, tp_size)

    def load(self) -> Callable[..., Any]:
        """Load the code and return the function. Only ranks call this.

        Raises RuntimeError if the file has changed since the sweep began, and whatever the file raises.
        """
        function: Callable[..., Any] = getattr(_module(self), self.function)
        return function


@functools.cache
def _module(variant: OutsideVariant) -> ModuleType:
    path = Path(variant.path)
    if _version(path, variant.module) != variant.version:
        raise RuntimeError(f"{path.name} changed after the sweep began: run it again with resume=true")
    if variant.module:
        return importlib.import_module(variant.module)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last: a file beside it must not hide the standard library
    module = ModuleType(f"tpbench_file_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # as dataclasses and pickle expect
    # Not through importlib: bytecode of an older file of the same second and size would count as this file's.
    exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    return module


def from_file(path: Path, function: str) -> OutsideVariant:
    """Return the variant `path:function`. Raises JobError in one line if the file cannot be used."""
    return _variant(f"{path.name}:{function}", path.resolve(), "", function)


def from_entry_point(name: str) -> OutsideVariant:
    """Return the variant of an installed package. Raises JobError in one line if it cannot be used."""
    module, function, path = _located(name)
    return _variant(name, path.resolve(), module, function)


def installed_names() -> list[str]:
    """Return the names of all entry points of the group, without those that this package has itself."""
    return sorted(set(metadata.entry_points(group=GROUP).names) - set(variants()))


def _located(name: str) -> tuple[str, str, Path]:
    """Return the module, the function and the module's file of an entry point. Raises JobError.

    Finding a module inside a package would import the package. So only the top-level package is searched for, and the
    rest of the path follows from the names.
    """
    entry, *others = metadata.entry_points(group=GROUP, name=name) or [None]
    if entry is None:
        raise JobError(f"no installed package has a variant {name}")
    if others:
        packages = sorted({str(point.dist.name) for point in (entry, *others) if point.dist is not None})
        raise JobError(f"several installed packages have a variant {name}: {', '.join(packages)}")
    if not entry.attr or "." in entry.attr:
        raise JobError(f"the entry point {name}={entry.value} must name a function, as MODULE:FUNCTION")
    top, *rest = entry.module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is not None and not rest and spec.origin:
        return entry.module, entry.attr, Path(spec.origin)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        place = Path(folder, *rest)
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file():
                return entry.module, entry.attr, file
    raise JobError(f"the entry point {name}={entry.value} names a module that is not installed")


def _package_files(module: str, file: Path) -> list[Path]:
    """Return all Python files of the module's top-level package, or the module's file alone."""
    depth = module.count(".") + (file.name == "__init__.py")
    return sorted(file.parents[depth - 1].rglob("*.py")) if depth else [file]


def _version(path: Path, module: str) -> str:
    return source.version(path, _files(path, module))


def _files(path: Path, module: str) -> list[Path]:
    return _package_files(module, path) if module else source.local_files(path)


def _variant(name: str, path: Path, module: str, function: str) -> OutsideVariant:
    file = source.read(path)
    public = [name for name in file.functions if not name.startswith("_")]
    if function in file.others and function not in file.functions:
        kind, line = file.others[function]
        raise JobError(f"{file.place(line)}: {function} is {kind}, and a variant needs a `def` at top level")
    if function not in file.functions:
        has = f"its functions: {', '.join(public)}" if public else "it has no function"
        raise JobError(f"{file.path.name} has no function {function} ({has})")
    parsed = file.functions[function]
    if not parsed.takes_two:
        raise JobError(
            f"{file.place(parsed.line)}: {function} must take two arguments, as {function}(problem, shard), not "
            f"({', '.join(parsed.parameters)})"
        )
    declared = _checked(parsed, file)
    if not module:
        file.require_imports(declared.get("requires", ()))
    uses_triton = declared.pop("uses_triton", None)
    for several in ("options", "requires"):
        declared[several] = tuple(sorted(declared.get(several, ())))
    declared["summary"] = declared.get("summary") or parsed.summary
    return OutsideVariant(
        name, str(path), module, function, parsed.line, _version(path, module),
        uses_triton=file.uses_triton if uses_triton is None else uses_triton, **declared,
    )  # fmt: skip


def _checked(function: source.Function, file: source.SourceFile) -> dict[str, Any]:
    """Return the declared arguments. Raises JobError for a name or a value that `variant` does not have."""
    declared, place = dict(function.declared), file.place(function.line)
    for name, value in declared.items():
        if name not in _KINDS:
            raise JobError(f"{place}: {unknown('argument of @variant', name, [*_KINDS, 'unsupported_reason'])}")
        texts = not isinstance(value, (tuple, list, set)) or all(isinstance(item, str) for item in value)
        if not isinstance(value, _KINDS[name]) or not texts:
            raise JobError(f"{place}: {name}={value!r} of @variant has the wrong type")
    if (workload := declared.get("workload", "entropy_loss")) not in workloads():
        raise JobError(f"{place}: {unknown('workload', workload, workloads())}")
    for option in declared.get("options", ()):
        if option not in (valid := workloads()[workload].option_defaults):
            raise JobError(f"{place}: {unknown(f'option of {workload}', option, valid)}")
    return declared
