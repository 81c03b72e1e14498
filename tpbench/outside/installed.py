"""Variants of installed packages: entry points of the group `tpbench.variants`. No package is imported here."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path

from tpbench.settings import JobError
from tpbench.workloads import variants

GROUP = "tpbench.variants"


def installed_names() -> list[str]:
    """Return the names of all entry points of the group, without those that this package has itself."""
    return sorted(set(metadata.entry_points(group=GROUP).names) - set(variants()))


def locate(name: str) -> tuple[str, str, Path]:
    """Return the module, the function and the module's file of an entry point. Raises JobError.

    Finding a module inside a package would import the package. So only the top-level package is searched for, and the
    rest of the path follows from the names.
    """
    entry, *others = metadata.entry_points(group=GROUP, name=name) or [None]
    if entry is None:
        raise JobError(f"no installed package has a variant {name}")
    if others:
        packages = sorted({str(each.dist.name) for each in (entry, *others) if each.dist is not None})
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


def package_files(module: str, file: Path) -> list[Path]:
    """Return all Python files of the module's top-level package, or the module's file alone."""
    depth = module.count(".") + (file.name == "__init__.py")
    return sorted(file.parents[depth - 1].rglob("*.py")) if depth else [file]
