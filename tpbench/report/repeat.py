"""The command that measures a stored row's cell again: `tpbench report PLACE --repeat ROW_ID`.

Stored values are data: they become quoted arguments, and a value that no command line can hold is an error.
"""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

import tpbench
from tpbench.job import NOT_IN_KEY, field_names, stored_job
from tpbench.measure.machine import RECORDED_VARIABLES
from tpbench.report.analysis.records import json_object
from tpbench.results.read import plain_rows
from tpbench.settings import JobError
from tpbench.suggestions import unknown

CHOSEN_BY_LAUNCHER = ("CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS")
"""Recorded environment variables that the launcher sets for each job."""


def row_command(frame: pd.DataFrame, row_id: str) -> str:
    """Return the command line, for a shell, that measures the cell of a row again, in the environment of the row.

    Raises JobError if there is no such row, if it doesn't say how it was measured, or if a command line cannot hold one
    of its values.
    """
    rows = plain_rows(frame[frame["row_id"].astype(str) == row_id])
    if not rows:
        raise JobError(unknown("row", row_id, frame["row_id"], "--columns row_id"))
    row, recorded = rows[0], json_object(rows[0].get("environment"))
    words = shlex.split(row["overrides"]) if row.get("overrides") else _arguments_of(json_object(row.get("job")))
    variables = [name for name in recorded if RECORDED_VARIABLES.fullmatch(name) and name not in CHOSEN_BY_LAUNCHER]
    environment = [f"{name}={shlex.quote(_printable(name, recorded[name]))}" for name in variables]
    quoted = [shlex.quote(_printable("overrides", word)) for word in words]
    return " ".join([*environment, "python -m tpbench", *quoted])


def _arguments_of(stored: Mapping[str, Any]) -> Sequence[str]:
    """Return arguments that set each field of a stored job, for a row that an older version made, without `overrides`.

    Raises JobError if a field is not as the files of this version say, or names a file of the user.
    """
    if not stored or ":" in str(stored.get("variant")):
        raise JobError("the row doesn't have its command line, and its job alone doesn't say how to measure it again")
    job = stored_job(stored)
    flat, workload = job.flat(), job.workload
    unused = {"variant", *NOT_IN_KEY, *job.unused_settings, *workload.outside_key, *workload.pivot.implied}
    names = [name for name in sorted(field_names(workload) - unused) if flat.get(name) is not None]
    conf = Path(tpbench.__file__).with_name("conf")
    for name in names:
        if (conf / name).is_dir() and not Path(conf, name, f"{flat[name]}.yaml").is_file():
            raise JobError(f"the row doesn't have its command line, and there is no {name} called {flat[name]}")
    shapes = sorted(conf.glob("shape/*.yaml"))
    shape = next(file.stem for file in shapes if f"shape_workload: {workload.name}\n" in file.read_text())
    return [
        f"variant={job.variant}",
        f"shape={shape}",
        *(f"{name}={str(flat[name]).lower() if isinstance(flat[name], bool) else flat[name]}" for name in names),
    ]


def _printable(name: str, value: object) -> str:
    if not str(value).isprintable():
        raise JobError(f"no command line can hold the stored value of {name}: it has control characters")
    return str(value)
