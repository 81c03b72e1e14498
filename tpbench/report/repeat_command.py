"""The command that measures a stored row's cell again.

Stored values are data: they become quoted arguments, and a value that no command line can hold is an error.
"""

from __future__ import annotations

import functools
import json
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

import tpbench
from tpbench.job import NOT_IN_KEY, Job, stored_job
from tpbench.measure.machine import RECORDED_VARIABLES
from tpbench.outside.variant import OutsideVariant
from tpbench.settings import JobError
from tpbench.workloads import variants, workloads

CONF = Path(tpbench.__file__).resolve().parent / "conf"
GROUPS = ("loss", "block_cap", "model", "measure")
"""Groups whose choices are named by the value of the field of the same name."""
CHOSEN_BY_LAUNCHER = ("CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS")
"""Recorded environment variables that the launcher sets for each job."""

_FROM_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.py:[A-Za-z_][A-Za-z0-9_]*")
_ENTRY_POINT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_PLAIN = re.compile(r"[\w./+:-]+")
"""Text that Hydra's grammar and a shell take as one word."""


def repeat_command(
    flat: Mapping[str, Any], environment: Mapping[str, str] | None = None, from_outside: bool = False
) -> str:
    """Return the command line, for a shell, whose job has the key of a stored one.

    Args:
        flat: the row's column `job`, read from JSON.
        environment: the row's column `environment`, read from JSON.
        from_outside: true if the row has the version of a variant from outside this package.

    Raises:
        JobError: this version of tpbench has no such job, or a command line cannot hold one of its values.
    """
    recorded = {
        name: str(value)
        for name, value in (environment or {}).items()
        if name in RECORDED_VARIABLES and name not in CHOSEN_BY_LAUNCHER
    }
    if unprintable := [name for name, value in recorded.items() if not value.isprintable()]:
        raise JobError(f"no command line can hold the stored value of {unprintable[0]}: it has control characters")
    words = [f"{name}={shlex.quote(value)}" for name, value in recorded.items()]
    return " ".join([*words, "python -m tpbench", *map(shlex.quote, arguments(_job(flat, from_outside)))])


def is_from_file(variant: object) -> bool:
    """Return True for the name of a variant in a user's file, such as my_loss.py:fast_tp."""
    return isinstance(variant, str) and _FROM_FILE.fullmatch(variant) is not None


def _job(flat: Mapping[str, Any], from_outside: bool) -> Job:
    variant, workload = str(flat.get("variant")), str(flat.get("workload"))
    installed = from_outside and variant not in variants() and _ENTRY_POINT.fullmatch(variant)
    if (is_from_file(variant) or installed) and workload in workloads():
        return stored_job(flat, OutsideVariant.named(variant, workload))
    return stored_job(flat)


def row_job(record: Mapping[str, Any]) -> Job:
    """Return the job of a row with the columns `job` and `variant_version`. Raises JobError as above."""
    return _job(_mapping(record["job"]), is_from_outside(record))


def is_from_outside(record: Mapping[str, Any]) -> bool:
    """Return True for a row of a variant from a user's file or from an installed package."""
    return is_from_file(record.get("variant")) or record.get("variant_version") is not None


def row_command(record: Mapping[str, Any]) -> str:
    """Return the command of a row with the columns of `row_job` and `environment`. It raises JobError as above."""
    return repeat_command(_mapping(record["job"]), _mapping(record.get("environment") or "{}"), is_from_outside(record))


def _mapping(text: Any) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise JobError("the row does not have its job")
    return found


def arguments(job: Job) -> list[str]:
    """Return the arguments of `python -m tpbench` for a job: the nearest shape, and each field that differs from it."""
    flat = job.flat()
    names = set(flat) - {*NOT_IN_KEY, *job.unused_settings, "workload", "variant"}
    wanted = {name: flat[name] for name in sorted(names)}
    shape = min(_shapes(job.workload.name), key=lambda name: _distance(wanted, job, name), default="")
    given = _defaults(job, shape)
    groups = {name: value for name, value in wanted.items() if name in GROUPS and _is_choice(name, value)}
    for name, value in groups.items():
        given |= _values(f"{name}/{value}")
    fields = {name: value for name, value in wanted.items() if name not in GROUPS and _differs(given, name, value)}
    chosen = {name: value for name, value in groups.items() if _differs(_defaults(job, shape), name, value)}
    words = [f"variant={job.variant}", *([f"shape={shape}"] if shape else [])]
    return words + [f"{name}={_text(name, value)}" for name, value in (chosen | fields).items()]


def _distance(wanted: Mapping[str, Any], job: Job, shape: str) -> int:
    """Return the number of fields that a command with this shape has to set."""
    given = _defaults(job, shape)
    return sum(_differs(given, name, value) for name, value in wanted.items())


def _defaults(job: Job, shape: str) -> dict[str, Any]:
    """Return the values of a command that names the job's variant and a shape only."""
    groups = ("loss/cross_entropy", "block_cap/auto", "measure/default")
    values = _values("config")
    for file in (*groups, f"workload/{job.workload.name}", f"variant/{job.variant}"):
        values |= _values(file)
    return values | _shapes(job.workload.name).get(shape, {})


@functools.cache
def _shapes(workload: str) -> dict[str, dict[str, Any]]:
    """Return the values of each shape of a workload, with those of the model that it names."""
    shapes = {}
    for file in sorted((CONF / "shape").glob("*.yaml")):
        values = _values(f"shape/{file.stem}")
        if values.pop("shape_workload", "") == workload:
            shapes[file.stem] = _model_values(file) | values
    return shapes


def _model_values(shape: Path) -> dict[str, Any]:
    """Return the fields of the model that a shape's list of defaults names."""
    defaults: Iterable[Any] = (yaml.safe_load(shape.read_text()) or {}).get("defaults", ())
    named = [each["override /model"] for each in defaults if isinstance(each, dict) and "override /model" in each]
    return _values(f"model/{named[0]}") if named else {}


def _values(file: str) -> dict[str, Any]:
    """Return the fields of a configuration file. A file that does not exist has none."""
    return dict(_read(file))


@functools.cache
def _read(file: str) -> Mapping[str, Any]:
    path = CONF / f"{file}.yaml"
    values = (yaml.safe_load(path.read_text()) or {}) if path.is_file() else {}
    return {name: value for name, value in values.items() if name not in ("defaults", "hydra")}


def _is_choice(group: str, value: object) -> bool:
    return bool(_PLAIN.fullmatch(str(value))) and (CONF / group / f"{value}.yaml").is_file()


def _differs(given: Mapping[str, Any], name: str, value: object) -> bool:
    return str(given.get(name)) != str(value)


def _text(name: str, value: object) -> str:
    """Return a value in Hydra's grammar."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = str(value)
    if not text.isprintable():
        raise JobError(f"no command line can hold the stored value of {name}: it has control characters")
    if not text or not _PLAIN.fullmatch(text):
        # Hydra's grammar: a backslash is an ordinary character except before a quote.
        escaped = re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), text)
        return f"'{escaped}'"
    return text
