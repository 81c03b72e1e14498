"""The command that measures a stored row's cell again: `tpbench report PLACE --repeat ROW_ID`.

Stored values are data: they become quoted arguments, and a value that no command line can hold is an error.
"""

import functools
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

import tpbench
from tpbench.job import NOT_IN_KEY, field_defaults, stored_job
from tpbench.measure.machine import RECORDED_VARIABLES
from tpbench.outside.variant import OutsideVariant
from tpbench.report.analysis.records import json_object
from tpbench.settings import JobError, spelled

CONF = Path(tpbench.__file__).resolve().parent / "conf"
CHOSEN_BY_CONFIG = ("loss/cross_entropy", "block_cap/auto")
CHOSEN_BY_LAUNCHER = ("CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS")
"""Recorded environment variables that the launcher sets for each job."""


def row_command(record: Mapping[str, Any]) -> str:
    """Return the command line, for a shell, whose job has the key of a row with the columns `job` and `environment`.

    It names the nearest shape, and each field that is not as the shape or the defaults say. Raises JobError if this
    version of tpbench has no such job, or if a command line cannot hold one of its values.
    """
    stored, recorded = json_object(record["job"]), json_object(record.get("environment"))
    if not stored:
        raise JobError("the row does not have its job")
    variant = str(stored.get("variant"))
    is_of_a_file = ":" in variant and "/" not in variant
    job = stored_job(stored, OutsideVariant(variant, str(stored.get("workload"))) if is_of_a_file else None)
    flat, workload = job.flat(), job.workload
    named = {*flat} - {"workload", "variant", *NOT_IN_KEY, *job.unused_settings, *workload.outside_key}
    given = field_defaults(workload.name)
    measure = f"measure/{Path(flat['measure']).name}"
    for file in ("config", measure, *CHOSEN_BY_CONFIG, f"workload/{workload.name}", f"variant/{variant}"):
        given |= _values(file)
    given["measure"] = "default"

    def differing(shape: str) -> list[str]:
        """Return the fields that a command with this shape has to set."""
        values = given | _values(f"shape/{shape}")
        return [name for name in sorted(named) if str(values.get(name)) != str(flat[name])]

    files = sorted((CONF / "shape").glob("*.yaml"))
    shapes = [file.stem for file in files if _values(f"shape/{file.stem}")["shape_workload"] == workload.name]
    shape = min(shapes, key=lambda name: len(differing(name)), default="")
    words = [f"variant={variant}", *([f"shape={shape}"] if shape else [])]
    words += [f"{name}={_text(name, flat[name])}" for name in differing(shape)]
    names = [name for name in recorded if RECORDED_VARIABLES.fullmatch(name) and name not in CHOSEN_BY_LAUNCHER]
    environment = [f"{name}={shlex.quote(_printable(name, recorded[name]))}" for name in names]
    return " ".join([*environment, "python -m tpbench", *map(shlex.quote, words)])


@functools.cache
def _values(file: str) -> dict[str, Any]:
    """Return the fields of a configuration file and of the model that it names. A file that does not exist has none."""
    path = CONF / f"{file}.yaml"
    content = (yaml.safe_load(path.read_text()) or {}) if path.is_file() else {}
    choices = [item for item in content.pop("defaults", ()) if isinstance(item, dict)]
    models = [item["override /model"] for item in choices if "override /model" in item]
    return {**(_values(f"model/{models[0]}") if models else {}), **content}


def _printable(name: str, value: object) -> str:
    if not str(value).isprintable():
        raise JobError(f"no command line can hold the stored value of {name}: it has control characters")
    return str(value)


def _text(name: str, value: object) -> str:
    """Return a value in Hydra's grammar."""
    text = spelled(value) if value is None or isinstance(value, bool) else _printable(name, value)
    if re.fullmatch(r"[\w./+:-]+", text):
        return text
    # Hydra's grammar: a backslash is an ordinary character except before a quote.
    escaped = re.sub(r"(\\*)('|$)", lambda match: 2 * match[1] + ("\\'" if match[2] else ""), text)
    return f"'{escaped}'"
