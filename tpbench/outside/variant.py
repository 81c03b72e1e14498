"""A variant from outside this package: where it is, what it declares, and how a rank gets its code.

The launcher doesn't run the file. It asks a process of its own, `tpbench.outside.describe`, what the file declares.
"""

import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tpbench.outside import source
from tpbench.outside.loading import load_module, variants_of
from tpbench.settings import JobError
from tpbench.suggestions import unknown
from tpbench.workloads import NAMES, Variant, Workload, workloads
from tpbench.workloads.definition import known

_PLAIN = re.compile(r"[A-Za-z0-9_./-]+")
"""Paths that are written in rows, tables and command lines as they are."""


@dataclass(frozen=True)
class OutsideVariant:
    """A variant of a user's file, as the launcher knows it. All values are plain: a task has them."""

    name: str
    """The name in rows and tables, FILE.py:FUNCTION. FILE is a path from the folder where the command runs. A file
    elsewhere has its name with that of its folder."""
    workload: str = NAMES[0]
    path: str = ""
    """Absolute path of the file. Empty: only a row names the variant, so it cannot be loaded."""
    function: str = ""
    line: int = 0
    """Line of the function, or 0 if the variant is another callable."""
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
        """The variant without its functions, which only ranks load."""
        traits = {"summary": "", **self.declared}
        traits |= {"options": frozenset(traits.get("options", ())), "requires": tuple(traits.get("requires", ()))}
        return self.of_workload.variant_class(self.name, prepare=_not_loaded, place=(self.path, self.line), **traits)

    @functools.cached_property
    def files(self) -> tuple[Path, ...]:
        """The file with the function and the files beside it that it imports."""
        return tuple(source.parsed_files(Path(self.path)))

    def refusal(self, problem: Any, tp_size: int, dp_size: int = 1) -> str | None:
        """Run the file and return why the variant cannot run the problem, or None. Only ranks call this."""
        _, variant, problem = self.loaded(problem)
        complaint = _complaint(problem, tp_size, dp_size) if self.definition and hasattr(problem, "check") else None
        return complaint or variant.unsupported_reason(problem, tp_size)

    def loaded(self, problem: Any) -> tuple[Workload, Variant, Any]:
        """Run the file and return the workload, the variant with its functions, and the problem as its own class.

        Only ranks call this. Raises RuntimeError if the file has changed since the sweep began, and the errors of the
        file itself.
        """
        in_file = variants_of(load_module(Path(self.path), self.version))
        matches = [pair for pair in in_file if (pair[0].name, pair[1].name) == (self.workload, self.function)]
        if not matches:
            raise RuntimeError(f"on this rank, {Path(self.path).name} declares no variant {self.function}")
        ((workload, loaded),) = matches
        traits = ("prepare", "unsupported_reason", "bytes_communicated")
        variant = replace(self.variant, **{name: getattr(loaded, name) for name in traits})
        if self.definition is None:  # a third argument of its function is a value of the user's own
            return workload, replace(variant, prepare=lambda problem, inputs: loaded.prepare(problem, inputs)), problem
        return workload, variant, workload.problem(**asdict(problem))


def _not_loaded(*_: Any) -> Any:
    raise RuntimeError("only ranks load the functions of a user's file")


def _complaint(problem: Any, tp_size: int, dp_size: int) -> str | None:
    """Return the first complaint of a user's problem: its `check` may return one, a list or a generator, or None."""
    from tpbench.workloads.step import WrongReturn

    complaints = problem.check(tp_size, dp_size) or ()
    found = [complaints] if isinstance(complaints, str) or not isinstance(complaints, Iterable) else [*complaints]
    if not all(isinstance(complaint, str) for complaint in found):
        raise WrongReturn(type(problem).check, f"check must return complaints, a list of str, not {complaints!r:.60}")
    return next(iter(found), None)


def from_file(path: Path, function: str) -> OutsideVariant:
    """Return the variant `path:function`. Raises JobError in one line if the file cannot be used."""
    path = path.resolve()
    version = source.version(path)
    matches = [fields for fields in _described(path, version) if fields["function"] == function]
    if not matches:
        raise JobError(unknown(f"variant in {path.name}", function, names_in(path)))
    if len(matches) > 1:
        owners = " and of ".join(fields["workload"] for fields in matches)
        raise JobError(f"{path.name}: {function} is a variant of {owners}: rename one of the functions")
    (fields,) = matches
    if fields["error"]:
        raise JobError(f"{path.name}: {fields['error']}")
    plain = {name: value for name, value in fields.items() if name != "error"}
    folder = Path.cwd() if path.is_relative_to(Path.cwd()) else path.parent.parent
    place = path.relative_to(folder).as_posix()
    name = f"{place if _PLAIN.fullmatch(place) else path.name}:{function}"
    return OutsideVariant(name, path=str(path), version=version, **plain)


def names_in(path: Path) -> list[str]:
    """Return what may stand behind `path:` on a command line. Raises JobError."""
    path = path.resolve()
    return [fields["function"] for fields in _described(path, source.version(path)) if not fields["error"]]


@functools.cache
def _described(path: Path, version: str) -> list[dict[str, Any]]:
    """Return what `tpbench.outside.describe` prints of each variant of a file, in a process of its own.

    Raises JobError.
    """
    command = [sys.executable, "-m", "tpbench.outside.describe", str(path), version]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        raise JobError(f"{path.name} still runs after 120 s: its top level must only declare") from None
    *_, last = ["", *ended.stdout.splitlines()]
    if ended.returncode or not last.startswith("{"):
        lines = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
        raise JobError(f"{path.name} cannot be loaded: {lines[-1]}")
    described: dict[str, Any] = json.loads(last)
    if error := described.get("error"):
        raise JobError(error)
    return list(described["variants"])
