"""Files and folders of a user that a command line names, as choices of Hydra's groups `variant`, `model` and `loss`."""

import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore

from tpbench.columns import type_of_hint
from tpbench.job import Job
from tpbench.launcher.options import GROUPS, SWEEP_OPTION_NAMES, aliases, read_choice
from tpbench.measure.session import MeasureSettings
from tpbench.outside import source
from tpbench.outside.variant import OutsideVariant, from_file, names_in
from tpbench.results.read import LABEL
from tpbench.results.schema import COMMON_COLUMNS, workload_columns
from tpbench.settings import JobError, user_path
from tpbench.workloads import NAMES, variants
from tpbench.workloads.losses import DIFFERENTIATED_PARAMETERS, OBJECTIVE_PARAMETERS

SHARED_COLUMNS = {"seed": int, "tokens": int, "vocab": int, "dtype": str}
"""Columns of every row that hold fields of several workloads' problems, with their types."""
REPORT_NAMES = frozenset({"hardware", "tp", "dp", "floor", "form", "notes", "when", "where", "columns", LABEL})
"""Names of which reports and `tpbench.load` make something else."""

_FILE = re.compile(r"(?P<path>.*\.py)(?::(?P<function>.*))?")
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.py")
"""File names that are written in rows, tables and command lines as they are."""

command_line_variants: dict[str, OutsideVariant] = {}
"""The variants that this process's command line has named, by their names in rows."""

typed_choices: dict[tuple[str, str], str] = {}
"""By group and choice: what a user types in any folder for a choice that a command line has added."""
user_files: set[str] = set()
"""The losses of user's files that this process's command line has named, as values of `objective`."""


def choice_name(group: str, typed: str, folders: Sequence[Path] = ()) -> str | None:
    """Make a user's file, folder or model's id a choice of Hydra, and return its name; None for other texts."""
    path, _, name = typed.rpartition(":")
    if group == "variant":
        # `FILE.py:all` means all variants of the file.
        if path.endswith(".py") and name == "all" and "all" not in (names := names_in(user_path(path))):
            return ",".join(filter(None, (choice_name(group, f"{path}:{name}") for name in names)))
        if typed in variants():
            return typed
        return None if (outside := find_outside(typed)) is None else _variant_name(outside)
    if group == "loss" and path.endswith(".py"):
        file = user_path(path, "the file of a loss").resolve()
        function = source.function(file, name, OBJECTIVE_PARAMETERS, DIFFERENTIATED_PARAMETERS)
        user_files.add(function)
        return _added(group, f"{file}:{name}", {"loss": "logprob", "objective": function})
    if group == "model" and "/" in typed:
        model = str(folder.resolve()) if (folder := user_path(typed)).exists() else typed
        # The sizes of another model stand for those that follow from the folder.
        node = {"defaults": ["tiny_llama3", "_self_"], "model_dir": model}
        return _file_of(typed, folders) or _added(group, model, node)
    return None


def _added(group: str, typed: str, node: dict[str, Any]) -> str:
    """Return the name of a new choice. `typed`: what a user types for it."""
    name = typed.replace("/", "|")
    ConfigStore.instance().store(name, {group: name} | node, group, "_global_")
    typed_choices[group, name] = typed
    return name


def _file_of(model_id: str, folders: Sequence[Path]) -> str | None:
    """Return the name of the file in a conf/model with the sizes of a model or of its base. A folder comes first."""
    files = [] if Path(model_id).is_dir() else [file for folder in folders for file in folder.glob("model/*.yaml")]
    ids = {model_id, model_id.removesuffix("-Instruct")}
    return next((file.stem for file in sorted(files) if ids & set(read_choice(file).get("hub_ids", ()))), None)


def _variant_name(outside: OutsideVariant) -> str:
    """Make a variant from outside a choice of Hydra, its workload a shape, and return its name. Raises JobError."""
    for other in command_line_variants.values():
        same_name = other.name == outside.name and other != outside
        same_workload = other.workload == outside.workload and other.definition != outside.definition
        if same_name or same_workload:
            name = outside.name if same_name else outside.workload
            raise JobError(f"{other.path} and {outside.path} both declare {name}: rename one of them")
    node: dict[str, Any] = {"variant": outside.name}
    if outside.definition:
        _require_free_names(outside)
        shape = {"shape_workload": outside.workload, "tp_size": None}
        ConfigStore.instance().store(outside.workload, shape, "shape", "_global_")
    else:
        node["defaults"] = [f"/workload/{outside.workload}", "_self_"]
    command_line_variants[outside.name] = outside
    choice = outside.name.replace("/", "|")  # a name with a slash would be a file in a folder
    ConfigStore.instance().store(choice, node, "variant", "_global_")
    typed_choices["variant", choice] = f"{outside.path}:{outside.function}"
    return choice


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


def _require_free_names(variant: OutsideVariant) -> None:
    """Raise JobError if a field or column of the variant's workload has the name of another field, option or column."""
    file = Path(variant.path).name
    taken = {field.name for cls in (Job, MeasureSettings) for field in fields(cls)} | SWEEP_OPTION_NAMES
    taken |= {*GROUPS, *aliases(), *REPORT_NAMES, *COMMON_COLUMNS} - SHARED_COLUMNS.keys()
    types = {field.name: type_of_hint(field.type) for field in fields(variant.of_workload.problem)}
    columns = [column for other in NAMES for column in workload_columns()[other].values()]
    typed = {column.name: column.type for column in columns} | SHARED_COLUMNS
    wrong = [name for name, kind in types.items() if name in taken or kind != typed.get(name, kind)]
    for name in wrong or variant.of_workload.column_types().keys() & {*REPORT_NAMES, *COMMON_COLUMNS, *typed, *types}:
        place = f"{file}: the {'field' if name in wrong else 'column'} {name} of {variant.workload}"
        raise JobError(f"{place} has a name that tpbench or a field uses: rename it")
