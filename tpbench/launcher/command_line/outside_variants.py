"""The variants from outside this package that the command line names: `variant=path/my_loss.py:fast_tp`.

Only the command line may name one. A row or a configuration file that names one loads no code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore

from tpbench.outside import source
from tpbench.outside.variant import OutsideVariant, from_entry_point, from_file, installed_names
from tpbench.settings import JobError
from tpbench.workloads import variants

_VARIANT = "variant="
_CHOICE = re.compile(r"""[^,()\[\]{}'"\\]+""")
"""A value among several: what Hydra's grammar separates by commas, brackets and quotation marks."""
_FILE = re.compile(r"(?P<path>.*\.py)(?::(?P<function>.*))?")
_WITHOUT_ENDING = re.compile(r"(?P<path>[^:]*[^:/]):(?P<function>[A-Za-z_]\w*)")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.py")
"""File names that are written in rows, tables and command lines as they are."""

_named: dict[str, OutsideVariant] = {}


def command_line_variants() -> Mapping[str, OutsideVariant]:
    """Return the variants that this process's command line has named, by their names in rows."""
    return _named


def replace_file_variants(arguments: Sequence[str]) -> list[str]:
    """Replace each `path/FILE.py:FUNCTION` of `variant=` by its name in rows, FILE.py:FUNCTION, and remember it.

    Names of entry points are remembered, too. Hydra then knows all of them as choices of the group `variant`.

    Raises:
        JobError: with a line for each variant whose file cannot be used.
    """
    _named.clear()
    errors: list[str] = []

    def name_of(match: re.Match[str]) -> str:
        try:
            return _remember(match[0])
        except JobError as error:
            errors.append(str(error))
            return match[0]

    result = [
        _VARIANT + _CHOICE.sub(name_of, argument.removeprefix(_VARIANT)) if argument.startswith(_VARIANT) else argument
        for argument in arguments
    ]
    if errors:
        raise JobError("\n".join(dict.fromkeys(errors)))
    return result


def find(choice: str) -> OutsideVariant | None:
    """Return the variant from outside that a value of `variant=` means, or None. Raises JobError."""
    if match := _FILE.fullmatch(choice.strip()):
        path = Path(match["path"]).expanduser()
        if not is_file_name(path.name):
            raise JobError(f"{path.name}: rename the file; its name may have letters, digits and _ - . of ASCII only")
        if not (function := match["function"]):
            public = [name for name in source.read(path).functions if not name.startswith("_")]
            raise JobError(
                f"variant={choice} names no function: write {choice.rstrip(':')}:FUNCTION "
                f"(its functions: {', '.join(public) or 'none'})"
            )
        if name := re.fullmatch(r"([A-Za-z_]\w*)\s+\w+=.*", function):
            rest = function[name.end(1) :].strip()
            raise JobError(
                f"variant={choice} has a space: write each NAME=VALUE as a word of its own, as "
                f"variant={match['path']}:{name[1]} {rest}, without quotes around both"
            )
        return from_file(path, function)
    if match := _WITHOUT_ENDING.fullmatch(choice.strip()):
        raise JobError(f"variant={choice}: write the file with its ending, as {match['path']}.py:{match['function']}")
    if choice in installed_names():
        return from_entry_point(choice)
    return None


def is_file_name(name: str) -> bool:
    """Return True if rows, tables and command lines can hold this name of a file as it is."""
    return _FILE_NAME.fullmatch(name) is not None


def register_choice(variant: OutsideVariant) -> None:
    """Make the variant a choice of Hydra's group `variant`."""
    node: dict[str, Any] = {"defaults": [f"/workload/{variant.workload}", "_self_"], "variant": variant.name}
    ConfigStore.instance().store(group="variant", name=variant.name, node=node, package="_global_", provider="tpbench")


def _remember(choice: str) -> str:
    if choice in variants() or (found := find(choice)) is None:
        return choice
    known = _named.setdefault(found.name, found)
    if known != found:
        raise JobError(
            f"{known.path} and {found.path} have the same name in rows, {found.name}: rename one of the files"
        )
    register_choice(found)
    return found.name
