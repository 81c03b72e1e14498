"""Variants from outside this package that a command line names, as choices of Hydra's group `variant`."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore

from tpbench.columns import type_of_hint
from tpbench.job import Job
from tpbench.launcher.options import GROUPS, SWEEP_OPTION_NAMES, aliases
from tpbench.measure.session import MeasureSettings
from tpbench.outside.variant import OutsideVariant, from_file, names_in
from tpbench.results.read import LABEL
from tpbench.results.schema import COMMON_COLUMNS, workload_columns
from tpbench.settings import JobError, user_path
from tpbench.workloads import NAMES, variants

SHARED_COLUMNS = {"seed": int, "tokens": int, "vocab": int, "dtype": str}
"""Columns of every row that hold fields of several workloads' problems, with their types."""
REPORT_NAMES = frozenset({"hardware", "tp", "dp", "floor", "form", "notes", "when", "where", "columns", LABEL})
"""Names of which reports and `tpbench.load` make something else."""

_FILE = re.compile(r"(?P<path>.*\.py)(?::(?P<function>.*))?")
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.py")
"""File names that are written in rows, tables and command lines as they are."""

command_line_variants: dict[str, OutsideVariant] = {}
"""The variants that this process's command line has named, by their names in rows."""


def name_in_rows(choice: str) -> str:
    """Return the name in rows of a value of `variant=`. Remember the variant if it is from outside this package.

    `FILE.py:all` means all variants of a file. Hydra then knows each as a choice of the group `variant`. Raises
    JobError for a variant that cannot be used.
    """
    file, _, function = choice.strip().rpartition(":")
    if function == "all" and file.endswith(".py") and "all" not in (names := names_in(user_path(file))):
        return ",".join(name_in_rows(f"{file}:{name}") for name in names)
    if choice in variants() or choice in command_line_variants or (outside := find_outside(choice)) is None:
        return choice
    known = command_line_variants.setdefault(outside.name, outside)
    if known != outside:
        raise JobError(
            f"{known.path} and {outside.path} have the same name in rows, {outside.name}: rename one of the files"
        )
    for other in command_line_variants.values():
        if other.workload == outside.workload and other.definition and other.definition != outside.definition:
            raise JobError(
                f"{other.path} and {outside.path} declare different workloads called {outside.workload}: "
                "write Workload(..., name=...) in one of them"
            )
    register_choice(outside)
    return outside.name


def find_outside(choice: str) -> OutsideVariant | None:
    """Return the variant from outside that a value of `variant=` means, or None. Raises JobError."""
    if not (match := _FILE.fullmatch(choice.strip())):
        return None
    path = user_path(match["path"], "the file of a variant")
    if not FILE_NAME.fullmatch(path.name):
        raise JobError(f"{path.name}: rename the file; its name may have letters, digits and _ - . of ASCII only")
    if not (function := match["function"]):
        raise JobError(
            f"variant={choice} names no function: write {choice.rstrip(':')}:FUNCTION "
            f"(its variants: {', '.join(names_in(path)) or 'none'})"
        )
    return from_file(path, function)


def register_choice(variant: OutsideVariant) -> None:
    """Make the variant a choice of Hydra's group `variant`. A workload from outside is a shape without sizes."""
    node: dict[str, Any] = {"variant": variant.name}
    if variant.definition:
        _require_free_names(variant)
        shape = {"shape_workload": variant.workload, "tp_size": None}
        ConfigStore.instance().store(variant.workload, shape, "shape", "_global_")
    else:
        node["defaults"] = [f"/workload/{variant.workload}", "_self_"]
    ConfigStore.instance().store(variant.name, node, "variant", "_global_")


def _require_free_names(variant: OutsideVariant) -> None:
    """Raise JobError if a field or column of the variant's workload has the name of another field, option or column."""
    file = Path(variant.path).name
    taken = {field.name for cls in (Job, MeasureSettings) for field in fields(cls)} | SWEEP_OPTION_NAMES
    taken |= {*GROUPS, *aliases(), *REPORT_NAMES, *COMMON_COLUMNS} - SHARED_COLUMNS.keys()
    types = {field.name: type_of_hint(field.type) for field in fields(variant.of_workload.problem)}
    typed = {
        name: column.type for other in NAMES for name, column in workload_columns()[other].items()
    } | SHARED_COLUMNS
    wrong = [name for name, kind in types.items() if name in taken or kind != typed.get(name, kind)]
    for name in wrong or variant.of_workload.column_types().keys() & {*REPORT_NAMES, *COMMON_COLUMNS, *typed, *types}:
        what = "field" if name in wrong else "column"
        raise JobError(
            f"{file}: the {what} {name} of {variant.workload} has a name that tpbench or a field uses: rename it"
        )
