"""Rows as reports compare them: one spelling for options, memory with that of CUDA graphs, and host-bound cells."""

from __future__ import annotations

import json
from dataclasses import replace

import pandas as pd

from tpbench.job import stored_job
from tpbench.measure.statistics import is_host_bound
from tpbench.settings import JobError
from tpbench.workloads import workloads


def comparable(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `load` with two changes. Apply it once.

    An option with the value that its default stands for on the row's device gets the default, and the row gets the key
    of that job. So rows from before and after a change of the default are of one cell.

    `graph_gib` is added to `peak_gib`, because torch counts little of the memory of CUDA graphs. The sum is an upper
    bound: the gradients of a stack's graph, for example, are in both.
    """
    for workload in workloads().values():
        for option in workload.options:
            if option.name in frame and option.default_by_device:
                same = frame[option.name] == frame["device"].map(option.default_by_device)
                same = same.fillna(False).astype(bool) & (frame["workload"] == workload.name)
                if same.any():
                    default = workload.option_defaults[option.name]
                    keys = [_key(row, option.name, default) for _, row in frame[same].iterrows()]
                    frame = frame.copy()
                    frame.loc[same, option.name], frame.loc[same, "key"] = default, keys
    if {"peak_gib", "graph_gib"} <= {*frame.columns}:
        frame = frame.assign(peak_gib=frame["peak_gib"] + frame["graph_gib"].fillna(0.0))
    return frame


def with_bound(frame: pd.DataFrame) -> pd.DataFrame:
    """Return rows in which `bound` is `host` also if it is missing and the two clocks show that the host bounds them.

    Rows from before that column do not have it.
    """
    if not {"bound", "time_ms", "device_ms"} <= {*frame.columns}:
        return frame
    idle = 1 - frame["device_ms"] / frame["time_ms"]
    return frame.assign(bound=frame["bound"].mask(frame["bound"].isna() & is_host_bound(idle), "host"))


def _key(row: pd.Series, option: str, default: object) -> str:
    """Return the key of a row's job with the default of an option, or the row's own if its job cannot be read."""
    try:
        job = stored_job(json.loads(row["job"]))
    except (JobError, ValueError, TypeError, RecursionError):
        return str(row["key"])
    return replace(job, problem=replace(job.problem, **{option: default})).key
