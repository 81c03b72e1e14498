"""Rows of the two sides of a comparison, which are folders, files, globs or sweeps."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from tpbench.report.analysis.metrics import counted
from tpbench.report.command_line import read_rows
from tpbench.settings import JobError

_SHOWN_SWEEPS = 3


def read_sides(before: str, after: str, places: Sequence[str]) -> tuple[pd.DataFrame, pd.DataFrame, list[str]]:
    """Return the rows of both sides, and remarks about rows that both sides have.

    A side is a folder, a file, a glob, or the id of a sweep whose rows are in `places`. Commas separate several. A row
    of both sides counts for the smaller side only, so `outputs` can be compared with one of its sweeps. Raises JobError
    for a side without rows, and for two sides with the same rows.
    """
    old, new = (_rows(side, places) for side in (before, after))
    shared = set(_row_names(old)) & set(_row_names(new))
    if not shared:
        return old, new, []
    if len(shared) == len(set(_row_names(old))) == len(set(_row_names(new))):
        raise JobError(
            f"{before} and {after} are the same {len(shared)} rows, so there is nothing to compare. Name two sweeps "
            f"of them instead: {_newest_sweeps(new)}"
        )
    if len(old) >= len(new):
        return old[~_row_names(old).isin(shared)], new, [f"{len(shared)} rows of both sides count for {after} only"]
    return old, new[~_row_names(new).isin(shared)], [f"{len(shared)} rows of both sides count for {before} only"]


def _row_names(frame: pd.DataFrame) -> pd.Series:
    names: pd.Series = frame["row_id"].astype(str) + " " + frame["started_at"].astype(str)
    return names


def _rows(side: str, places: Sequence[str]) -> pd.DataFrame:
    """Return the rows of one side."""
    names = [side] if _is_place(side) else [name for name in side.split(",") if name]
    folders = [name for name in names if _is_place(name) and not _is_sweep_log(name)]
    if not names or folders == names:
        return read_rows(names or [side])
    if folders:
        raise JobError(f"{side}: name sweeps or folders on one side, not both")
    logs = [str(Path(name).parent.parent) for name in names if _is_place(name)]
    where = list(dict.fromkeys(logs)) or list(places)
    ids = [Path(name).name for name in names]
    try:
        frame = read_rows(where)
    except JobError:
        raise JobError(f"no such folder or file: {side}, and no sweeps in {', '.join(where)} (see --rows)") from None
    known = frame["sweep_id"].dropna().unique()
    chosen = []
    for name in ids:
        found = [sweep for sweep in known if sweep == name] or [
            sweep for sweep in known if sweep.startswith(name) or sweep.endswith(name)
        ]
        if len(found) != 1:
            problem = f"{len(found)} sweeps of {', '.join(where)} match" if found else "no such folder, file or sweep:"
            raise JobError(f"{problem} {name}. Newest sweeps in {', '.join(where)}: {_newest_sweeps(frame)}")
        chosen += found
    return frame[frame["sweep_id"].isin(chosen)]


def _is_place(name: str) -> bool:
    return Path(name).exists() or bool(glob.glob(name, recursive=True))  # noqa: PTH207  absolute patterns


def _is_sweep_log(name: str) -> bool:
    """Return true for the folder of a sweep's logs, outputs/sweeps/ID. The rows are in outputs/rows."""
    return Path(name).absolute().parent.name == "sweeps" and not any(Path(name).rglob("*.parquet"))


def _newest_sweeps(frame: pd.DataFrame) -> str:
    started = frame.groupby("sweep_id")["started_at"].agg(["min", "size"]).reset_index()
    newest = started.sort_values(["min", "sweep_id"], ascending=False).head(_SHOWN_SWEEPS)
    shown = [
        f"{name} ({counted(count, 'row')})" for name, count in zip(newest["sweep_id"], newest["size"], strict=True)
    ]
    return ", ".join(shown) or "none"
