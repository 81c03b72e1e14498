"""The decorator `tpbench.api.variant`, and how a user's file is run: by ranks, and by the process that describes it."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from tpbench.outside import source
from tpbench.suggestions import unknown
from tpbench.workloads import NAMES, FunctionT, Variant, Workload, workloads

_DECLARED = "_tpbench_variant"
"""Attribute of a declared function: its workload's name and the traits of its variant."""


def variant(
    summary: str = "",
    *,
    workload: str = NAMES[0],
    options: Iterable[str] = (),
    requires: Iterable[str] = (),
    requires_cuda: bool = False,
    cpu_only_reason: str = "",
    no_graph_reason: str = "",
    process_settings: str = "",
    uses_triton: bool | None = None,
    unsupported_reason: Callable[[Any, int], str | None] | None = None,
) -> Callable[[FunctionT], FunctionT]:
    """Declare the decorated function as a variant.

    Args:
        summary: one line for `python -m tpbench list`. Empty: the first line of the function's docstring.
        workload: the workload whose operation the function implements.
        options: names of the workload's options that the function honours.
        requires: importable names of the packages without which the variant is skipped.
        requires_cuda: True if the variant is skipped on a CPU.
        cpu_only_reason: why the variant cannot run on GPUs. Empty if it can.
        no_graph_reason: why an iteration cannot be captured in a CUDA graph. Empty if it can.
        process_settings: settings of the whole process that the function changes, such as a switch of torch or an
            environment variable. Its jobs then share their processes with no others. Empty: none.
        uses_triton: True if the kernels run in Triton's interpreter on a CPU. None: if the file imports triton.
        unsupported_reason: `(problem, tp_size) -> str | None`. It returns why the variant cannot run a problem. The
            ranks call it, and the cell is then skipped with that reason.
    """
    traits = {name: value for name, value in locals().items() if name != "workload"}  # fields of `Variant`
    if unsupported_reason is None:
        del traits["unsupported_reason"]
    if callable(summary):
        raise TypeError("write @variant() with parentheses")
    if workload not in workloads():
        raise ValueError(unknown("workload", workload, workloads()))

    def declare(function: FunctionT) -> FunctionT:
        setattr(function, _DECLARED, (workload, traits))
        return function

    return declare


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
        if (other := _imported_files.setdefault(name, file)) != file and other.read_bytes() != file.read_bytes():
            others = f"another variant in this process imports another {name}"
            raise RuntimeError(f"{path.name} imports {name}, and {others}: rename one, or run them in two sweeps")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last: a file beside it must not hide the standard library
    module = ModuleType(f"tpbench_file_{path.stem}_{version}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # as dataclasses and pickle expect
    # Not through importlib: bytecode of an older file of the same second and size would count as this file's.
    exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    return module


def function_of(text: str) -> Any:
    """Run the file of PATH:NAME@VERSION (see `source.function`), and return the function. Only ranks call this."""
    place, _, version = text.rpartition("@")
    path, _, name = place.rpartition(":")
    return getattr(load_module(Path(path), version), name)


def workloads_of(module: ModuleType) -> list[Workload]:
    """Return the workloads that a user's file declares. Raises ValueError if two have one name."""
    found = list({id(value): value for value in vars(module).values() if isinstance(value, Workload)}.values())
    names = dict.fromkeys(workload.name for workload in found)
    if len(names) < len(found):
        raise ValueError(f"two workloads have one name: write Workload(..., name=...) ({', '.join(names)})")
    return found


def variants_of(module: ModuleType) -> list[tuple[Workload, Variant]]:
    """Return the variants that a user's file declares, each with its workload.

    In a file without a workload of its own, each public function counts as one, also without the decorator.
    """
    own = workloads_of(module)
    found = [(workload, variant) for workload in own for variant in workload.variants.values()]
    for name, function in vars(module).items():
        declared = getattr(function, "__dict__", {}).get(_DECLARED)
        is_public = inspect.isfunction(function) and function.__module__ == module.__name__ and name[0] != "_"
        if declared or (is_public and not own):
            workload, traits = declared or (NAMES[0], {"summary": ""})
            found.append((workloads()[workload], Variant(name, prepare=function, **traits)))
    return found
