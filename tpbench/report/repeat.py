"""The command that measures a stored row's cell again: `scripts/report.py PLACE --repeat ROW_ID`.

Stored values are data: they become quoted arguments, and a value that no command line can hold is an error.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

import tpbench
from tpbench.job import NOT_IN_KEY, Job, field_defaults, stored_job
from tpbench.measure.machine import RECORDED_VARIABLES
from tpbench.outside.variant import OutsideVariant
from tpbench.report.analysis.records import json_object
from tpbench.results.read import plain_rows
from tpbench.settings import JobError, spelled
from tpbench.suggestions import nearest, printable
from tpbench.workloads import variants, workloads

CONF = Path(tpbench.__file__).resolve().parent / "conf"
DEFAULTS = ("config", "loss/cross_entropy", "block_cap/auto", "measure/default")
"""Files of the configuration that every job has, unless a command chooses others."""
GROUPS = ("loss", "block_cap", "model", "measure")
"""Groups whose choices are named by the value of the field of the same name."""
CHOSEN_BY_LAUNCHER = ("CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS")
"""Recorded environment variables that the launcher sets for each job."""

_OUTSIDE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(\.py:[A-Za-z_][A-Za-z0-9_]*)?")
"""Name of a variant in an installed package, or in a file as my_loss.py:fast_tp."""
_PLAIN = re.compile(r"[\w./+:-]+")
"""Text that Hydra's grammar and a shell take as one word."""


def print_command(frame: pd.DataFrame, row_id: str) -> None:
    """Print the command that measures a row's cell again.

    `row_id` is the identifier of one of the rows, or the beginning or end of it. Raises JobError if no row or several
    rows have it, or if the row has no command.
    """
    names = frame["row_id"].astype(str)
    rows = frame[names == row_id]
    if rows.empty and len(row_id) >= 4:
        rows = frame[names.str.startswith(row_id) | names.str.endswith(row_id)]
    shown = printable(row_id, 100)
    if rows.empty:
        raise JobError(f"no row has the identifier {shown}{nearest(row_id, names, most=3)} (column row_id)")
    if len(rows) > 1:
        raise JobError(f"{len(rows)} rows match {shown}: {', '.join(rows['row_id'].head(3))}: name one of them whole")
    print(row_command(plain_rows(rows)[0]), flush=True)


def row_command(record: Mapping[str, Any]) -> str:
    """Return the command line, for a shell, whose job has the key of a stored row.

    The row has the columns `job`, `variant_version` and `environment`. Raises JobError if this version of tpbench has
    no such job, or if a command line cannot hold one of its values.
    """
    recorded = json_object(record.get("environment"))
    names = [name for name in recorded if RECORDED_VARIABLES.fullmatch(name) and name not in CHOSEN_BY_LAUNCHER]
    words = [f"{name}={shlex.quote(_printable(name, recorded[name]))}" for name in names]
    return " ".join([*words, "python -m tpbench", *map(shlex.quote, arguments(row_job(record)))])


def _printable(name: str, value: object) -> str:
    if not str(value).isprintable():
        raise JobError(f"no command line can hold the stored value of {name}: it has control characters")
    return str(value)


def row_job(record: Mapping[str, Any]) -> Job:
    """Return the job of a row with the columns `job` and `variant_version`. Raises JobError as `row_command` does."""
    flat = json_object(record["job"])
    if not flat:
        raise JobError("the row does not have its job")
    variant, workload = str(flat.get("variant")), str(flat.get("workload"))
    is_from_outside = ":" in variant or record.get("variant_version") is not None
    if is_from_outside and variant not in variants() and workload in workloads() and _OUTSIDE.fullmatch(variant):
        return stored_job(flat, OutsideVariant(variant, workload))
    return stored_job(flat)


def arguments(job: Job) -> list[str]:
    """Return the arguments of `python -m tpbench` for a job: the nearest shape, and each field that differs from it."""
    flat, workload = job.flat(), job.workload
    names = {*flat} - {*NOT_IN_KEY, *job.unused_settings, *workload.former_fields, *workload.outside_key}
    names -= {"workload", "variant"}
    given = dict(field_defaults(workload.name))
    for file in (*DEFAULTS, f"workload/{workload.name}", f"variant/{job.variant}"):
        given |= _values(file)

    def to_set(given: Mapping[str, Any]) -> list[str]:
        """Return the fields that a command with these values has to set."""
        return [name for name in sorted(names) if str(given.get(name)) != str(flat[name])]

    shapes = {file.stem: _values(f"shape/{file.stem}") for file in sorted((CONF / "shape").glob("*.yaml"))}
    of_workload = [name for name, values in shapes.items() if values["shape_workload"] == workload.name]
    shape = min(of_workload, key=lambda name: len(to_set(given | shapes[name])), default="")
    given |= shapes.get(shape, {})
    words = [f"variant={job.variant}", *([f"shape={shape}"] if shape else [])]
    for name in (name for name in GROUPS if name in to_set(given)):
        if _PLAIN.fullmatch(str(flat[name])) and (CONF / name / f"{flat[name]}.yaml").is_file():
            words.append(f"{name}={flat[name]}")
            given |= {name: flat[name]} | _values(f"{name}/{flat[name]}")
    return words + [f"{name}={_text(name, flat[name])}" for name in to_set(given)]


@functools.cache
def _values(file: str) -> dict[str, Any]:
    """Return the fields of a configuration file and of the model that it names. A file that does not exist has none."""
    path = CONF / f"{file}.yaml"
    content = (yaml.safe_load(path.read_text()) or {}) if path.is_file() else {}
    choices = [item for item in content.pop("defaults", ()) if isinstance(item, dict)]
    models = [item["override /model"] for item in choices if "override /model" in item]
    return {**(_values(f"model/{models[0]}") if models else {}), **content}


def _text(name: str, value: object) -> str:
    """Return a value in Hydra's grammar."""
    text = spelled(value) if value is None or isinstance(value, bool) else _printable(name, value)
    if not text or not _PLAIN.fullmatch(text):
        # Hydra's grammar: a backslash is an ordinary character except before a quote.
        escaped = re.sub(r"(\\*)('|$)", lambda match: 2 * match[1] + ("\\'" if match[2] else ""), text)
        return f"'{escaped}'"
    return text
