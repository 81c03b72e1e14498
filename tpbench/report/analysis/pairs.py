"""Cells of two sets of rows in pairs, and the conditions that must agree before two rows are compared."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeAlias

import pandas as pd

from tpbench.report.analysis.grid import form_of, problem_fields, row_records
from tpbench.report.analysis.row_values import Record, is_measurement, named
from tpbench.results.current_rows import json_object, replaced_rows
from tpbench.tables import value_text
from tpbench.workloads import workloads
from tpbench.workloads.definition import workload_of

CellIdentity: TypeAlias = tuple[tuple[str, Any], ...]
CellPair: TypeAlias = tuple[str, Sequence[Record], Sequence[Record]]
"""The name of a cell, its rows before and its rows after: the newest one, and before it the rows that repeat it. A side
without the cell has no rows."""

BESIDE = "beside"
"""Column with the jobs that ran on the host at the same time. Two rows are compared only if both ran alone."""
ACROSS = (
    "gpu_name", "cpu_model", "driver_version", "cuda_version", "nccl_version", "torch_version", "triton_version",
    "python_version", "backend", "interpreted", "warmed_up", "memory_limit_gib", BESIDE,
)  # fmt: skip
"""Columns that must be equal for two rows to be compared, if both rows have them. A user may allow a difference.

The model of the CPU counts on a CPU only. The memory limit counts on a GPU only, because on a CPU it is the memory that
was free. Versions of tpbench and its kernels may differ, because a comparison shows their effect."""
_CODE = ("tpbench_version", "kernels_version", "variant_version", "git_commit", "git_dirty", "user_commit")
NOTED = ("host", "gpu_count", "cpu_count", "package_versions", *_CODE)
"""Columns whose difference is noted but permitted. So are the recorded variables of the environment."""
_STACK = (*(name for name in ACROSS if name != "memory_limit_gib"), "package_versions", *_CODE)
OF_PLACE = ("CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Recorded variables that say where a job ran. The launcher sets them."""
_ALWAYS = {"workload": None, "variant": None, "device": None, "graph": False, "fresh": False, "nodes": 1}
_ALWAYS |= {"tp_size": None, "dp_size": 1}
"""Columns of every cell's identity, with their defaults."""
_NAMED_FIRST = ("workload", "loss", "dtype", "tokens", "vocab", "tp_size")


def stack(row: Record, *, on_any_host: bool = False) -> tuple[Any, ...]:
    """Return the code, the packages and the machine of a row. Rows with the same ones repeat each other."""
    return tuple(row.get(name) for name in (_STACK if on_any_host else (*_STACK, "host")))


def differences(before: Record, after: Record, allowed: Collection[str] = ()) -> list[str]:
    """Return why two rows must not be compared: differences in hardware, software and method."""
    return _differing([name for name in ACROSS if name not in allowed], before, after)


def remarks(before: Record, after: Record, allowed: Collection[str] = ()) -> list[str]:
    """Return differences between two rows that permit a comparison but must be noted."""
    notes = _differing([*NOTED, *(name for name in ACROSS if name in allowed)], before, after)
    left, right = (json_object(row.get("environment")) for row in (before, after))
    for name in sorted({*left, *right} - {*OF_PLACE}) if left and right else ():
        one, other = (value_text(variables.get(name, "unset")) for variables in (left, right))
        notes += [f"{name} {one} and {other}"] if one != other else []
    return notes


def _differing(names: Iterable[str], before: Record, after: Record) -> list[str]:
    """Return the columns in which two rows differ, with both values. A missing value doesn't count as a difference."""
    notes, skipped = [], "memory_limit_gib" if before.get("device") == "cpu" else "cpu_model"
    for name in names:
        old, new = before.get(name), after.get(name)
        if name == BESIDE:
            sides = [side for side, value in (("before", old), ("after", new)) if value]
            notes += [f"other jobs ran beside it {' and '.join(sides)}"] if sides else []
        elif name != skipped and old is not None and new is not None and old != new:
            left, right = (value_text(value)[: 12 if name in _CODE else None] for value in (old, new))
            notes.append(f"{name} {left} and {right}")
    return notes


def pair_cells(before: pd.DataFrame, after: pd.DataFrame) -> list[CellPair]:
    """Pair the rows of each cell with those of the other set, on the same hardware if possible."""
    old, new = rows_by_cell(before), rows_by_cell(after)
    names = cell_names([*old, *new])
    pairs: list[CellPair] = []
    for cell in dict.fromkeys([*new, *old]):
        left, right = ({key: _repeated(rows) for key, rows in side.get(cell, {}).items()} for side in (old, new))
        sides = [(left.pop(machine), right.pop(machine)) for machine in [*right] if machine in left]
        sides += itertools.zip_longest(left.values(), right.values(), fillvalue=())
        pairs += [(names[cell], *side) for side in sides]
    return pairs


def _repeated(rows: Sequence[Record]) -> tuple[Record, ...]:
    """Return the newest of some rows, after the rows that it repeats, on any host of the same kind."""
    *older, newest = rows
    measured = filter(is_measurement, older if is_measurement(newest) else ())
    wanted = stack(newest, on_any_host=True)
    return (*(row for row in measured if stack(row, on_any_host=True) == wanted), newest)


def rows_by_cell(frame: pd.DataFrame) -> dict[CellIdentity, dict[Any, list[Record]]]:
    """Return the rows of each cell by hardware, oldest first. Failures beside a measurement are left out."""
    frame = frame.assign(when=frame["finished_at"].fillna(frame["started_at"])).drop(replaced_rows(frame))
    cells: dict[CellIdentity, dict[Any, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in row_records(frame.sort_values("when", kind="stable", na_position="first")):
        cells[_identity(record)][record["hardware"]].append(record)
    return cells


def _identity(record: Record) -> CellIdentity:
    """Return the whole problem of a cell, options included. It does not depend on the defaults of the configuration."""
    workload = workload_of(record)
    problem = problem_fields(workload) or dict.fromkeys(_NAMED_FIRST)
    defaults = dict.fromkeys(_ALWAYS) | problem | {name: value for name, value in _ALWAYS.items() if value is not None}
    values = {name: default if record.get(name) is None else record[name] for name, default in defaults.items()}
    is_text = {name for name, value in values.items() if name == "block_cap" or isinstance(value, list)}
    cell = tuple((name, str(value) if name in is_text else value) for name, value in values.items())
    return (*cell, ("form", form_of(workload) or None))


def cell_names(cells: Collection[CellIdentity]) -> dict[CellIdentity, str]:
    """Return the name of each cell: its variant, and the fields in which cells differ."""
    distinct = Counter(name for name, _ in dict.fromkeys(itertools.chain.from_iterable(cells)))
    shown = [name for name, count in distinct.items() if name in ("vocab", "tp_size") or count > 1]
    shown.sort(key=lambda name: _NAMED_FIRST.index(name) if name in _NAMED_FIRST else len(_NAMED_FIRST))
    defaults = {option for workload in workloads().values() for option in workload.option_defaults.items()}
    names = {}
    for cell in cells:
        values = dict(cell)
        fields = [name for name in shown if values.get(name) is not None and (name, values[name]) not in defaults]
        words = [named(name, values[name]) for name in fields if name != "variant"]
        names[cell] = " ".join([value_text(values["variant"]), *words])
    return names
