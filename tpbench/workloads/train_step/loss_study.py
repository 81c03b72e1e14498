"""Study `train_loss`: what is a loss worth in a step? Each loss is compared with torch's, sweep by sweep.

A process as a whole may be faster than the next, so each sweep that measured both losses gives one ratio, and the
interval is that of a t test of the ratios' logarithms. Run several sweeps, and name the losses in turns: A B, B A, B A,
A B. Steady drift then cancels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import pandas as pd

from tpbench.settings import spelled
from tpbench.tables import MISSING, UNDECIDED, Table, TableCell, number_cell
from tpbench.workloads.train_step.problem import TrainStep

BASELINE = "torch"
CONFIDENCE = 0.95
SETTINGS = {
    name: spelled(each.default)
    for each in fields(TrainStep)
    if each.metadata["column"] and (name := each.name) not in ("train_loss", "dtype", "steps", "warmup_steps")
}
"""Defaults of the other settings, without those that only say how many steps are measured. Older rows lack some."""
PROBLEM = ("gpu_name", "dtype", *SETTINGS, "dp_size", "tp_size", "variant", "graph", "torch_version")
"""Columns that must agree for losses to be compared."""
USUAL = SETTINGS | {"dtype": "", "graph": "false"}
"""Values that a heading leaves out."""
MEASURED = ("tokens_per_s_per_gpu", "time_ms", "launch_ms", "peak_gib", "steady_gib", "memory_limit_gib")
COLUMNS = (
    "train_loss", "sweeps", "tokens_per_s_per_gpu", "time_ms", "of torch's time", "launch_ms", "peak_gib", "saved_gib",
    "batch that fits",
)  # fmt: skip
NOTES = (
    "of torch's time: a geometric mean over the sweeps that measured both losses, with the 95% interval of a t test of "
    "the logarithms. Other numbers are medians over the sweeps. ?: undecided, because the interval includes 1.000x, "
    "there is one sweep only, or the medians of the times are in the other order",
    "batch that fits: the largest batch_size for which a rank's memory is expected to suffice, if what a step adds to "
    "steady_gib grows in proportion, by each sweep's memory. It was not run",
)


def tables(rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Return a table with a line for each loss of each problem that was measured with torch's loss, too."""
    names = [*PROBLEM, "train_loss", "sweep_id", *MEASURED]
    frame = pd.DataFrame([[row.get(name) for name in names] for row in rows], columns=names)
    frame = frame.fillna({name: value for name, value in SETTINGS.items() if value != "null"})
    frame[[*PROBLEM]] = frame[[*PROBLEM]].map(spelled)
    frame[[*MEASURED]] = frame[[*MEASURED]].astype(float)
    compared = frame.groupby([*PROBLEM], sort=False)["train_loss"].transform(lambda losses: losses.nunique() > 1)
    frame = frame[compared.astype(bool)]
    varying = [name for name in PROBLEM if frame[name].nunique() > 1]
    lines = []
    for _, group in frame.groupby([*PROBLEM], sort=False):
        key = [TableCell(value) for value in group[varying].iloc[0]]
        of_sweeps = group.groupby(["train_loss", "sweep_id"], sort=False)[[*MEASURED]].median()
        if BASELINE in of_sweeps.index:
            lines += [[*key, *line] for line in _lines(of_sweeps, int(group["batch_size"].iloc[0]))]
    if not lines:
        return []
    facts = {name: frame[name].iloc[0] for name in PROBLEM if name not in varying}
    heading = ", ".join(f"{name}={value}" for name, value in facts.items() if USUAL.get(name) != value)
    return [Table(f"train_step, {heading}", (*varying, *COLUMNS), lines, facts, NOTES, keys=len(varying) + 1)]


def _lines(of_sweeps: pd.DataFrame, batch_size: int) -> list[list[TableCell]]:
    """Return the cells of each loss of a problem, torch's first. `of_sweeps` has `MEASURED` by loss and sweep."""
    baseline, lines = of_sweeps.loc[BASELINE], []
    for loss in sorted(of_sweeps.index.unique(0), key=lambda loss: loss != BASELINE):
        sweeps = of_sweeps.loc[loss]
        middle: Any = sweeps.median()
        compared = loss != BASELINE
        lines.append(
            [
                TableCell(str(loss)),
                number_cell(len(sweeps), "{:.0f}".format),
                number_cell(middle["tokens_per_s_per_gpu"], "{:.0f}".format),
                number_cell(middle["time_ms"], "{:.1f}".format),
                ratio_cell(sweeps["time_ms"], baseline["time_ms"]) if compared else TableCell(MISSING),
                number_cell(middle["launch_ms"] if middle["launch_ms"] > 0 else None, "{:.1f}".format),
                number_cell(middle["peak_gib"], "{:.2f}".format),
                number_cell(baseline["peak_gib"].median() - middle["peak_gib"] if compared else None, "{:.2f}".format),
                _batch_cell(sweeps, batch_size),
            ]
        )
    return lines


def _batch_cell(sweeps: pd.DataFrame, batch_size: int) -> TableCell:
    """Return the batch sizes that are expected to fit: the least and the largest of the sweeps' numbers."""
    added_gib = sweeps["peak_gib"] - sweeps["steady_gib"]
    fits = batch_size * (sweeps["memory_limit_gib"] - sweeps["steady_gib"]) / added_gib.where(added_gib > 0)
    sizes = fits.dropna().map(math.floor)
    if sizes.empty:
        return TableCell(MISSING)
    least, largest = int(sizes.min()), int(sizes.max())
    return TableCell(f"{least}" if least == largest else f"{least} to {largest}", least)


def ratio_cell(times: pd.Series[float], baseline: pd.Series[float]) -> TableCell:
    """Return the geometric mean of the ratios of sweeps with both times, with its interval if there are several."""
    from scipy import special

    logs = (times / baseline).dropna().map(math.log)
    if logs.empty:
        return TableCell(MISSING)
    mean = math.exp(logs.mean())
    if len(logs) == 1:
        return TableCell(f"{mean:.3f}x{UNDECIDED}", mean)
    reach = float(special.stdtrit(len(logs) - 1, (1 + CONFIDENCE) / 2)) * float(logs.std()) / math.sqrt(len(logs))
    low, high = (mean * math.exp(sign * reach) for sign in (-1, 1))
    decided = not low <= 1 <= high and (mean < 1) == (times.median() < baseline.median())
    mark = "" if decided else UNDECIDED
    return TableCell(f"{mean:.3f}x{mark}, {low:.3f} to {high:.3f}", mean, note=f"{low:.4g} to {high:.4g}")
