"""`tpbench predict --validate`: how well cells are predicted that were left out of the fit."""

import math
from collections.abc import Collection

import pandas as pd

from tpbench.predict.model import AXES, COUNTED, ERROR_BAR_SHARE, GPU, LARGEST_ERROR, TIMES, error_bar, pooled_errors
from tpbench.tables import MISSING, Document, Table

LEAST_COVERAGE, LEAST_KNOWN, LARGEST_BAR, LARGEST_COUNT_ERROR = 0.85, 0.8, 0.15, 0.03
"""Aims of the validation: the share of true times within their error bars, the share of cells inside the measured range
that have a number, the median error bar of these, and the median error of memory and sent bytes of each variant."""


def validation(left_out: pd.DataFrame, labels: Collection[str], gpu: str) -> tuple[Document, bool]:
    """Return tables of how well the variants' left-out cells are predicted, and true if they reach the aims."""
    columns = ("left out", "times", "inside", "predicted", "within +-", "of inside", "median +-")
    lines, found = left_out[left_out["label"].isin(labels)], {*left_out["axis"]}
    times, rows, reached = _with_bars(lines[lines["name"].isin(TIMES)], left_out), [], True
    for axis in (axis for axis in (*AXES, GPU) if axis in found):
        of_axis = times[times["axis"] == axis]
        inside, known = of_axis[of_axis["inside"]], of_axis[of_axis["known"]]
        within, of_inside = (known["error"] <= known["bar"]).mean(), inside["known"].mean()
        median = known.loc[known["inside"], "bar"].median()
        reached &= not (within < LEAST_COVERAGE or of_inside < LEAST_KNOWN or median > LARGEST_BAR)
        sizes = [str(len(part)) for part in (of_axis, inside, known)]
        rows.append([f"a {axis}", *sizes, *map(_share, (within, of_inside, median))])
    rows.append(["aim", "", "", "", *map(_share, (LEAST_COVERAGE, LEAST_KNOWN, LARGEST_BAR))])
    counted = lines[lines["name"].isin(COUNTED) & (lines["error"] < math.inf)]
    medians = counted.groupby(["name", "label"])["error"].median().groupby("name").max()
    reached &= not (medians > LARGEST_COUNT_ERROR).any()
    notes = [f"largest median error of a variant's {name}: {_share(error)}" for name, error in medians.items()]
    missing = sorted({*AXES, GPU} - found)
    notes += [f"a {axis} is not validated: the rows of each variant are of one" for axis in missing]
    notes.append("a variant, or a loss of a variant, without rows lies outside the measured range: it is unknown")
    caption = (
        f"wall and device times on {gpu}, predicted from the other cells of their variant; inside: cells of their loss "
        f"have less and more of each size; +- promises {ERROR_BAR_SHARE:.0%}"
    )
    table = Table("", columns, rows, notes=notes, keys=1)
    return Document([table], caption, [f"the aims are {'' if reached else 'not '}reached"]), bool(reached)


def _with_bars(times: pd.DataFrame, left_out: pd.DataFrame) -> pd.DataFrame:
    """Return times with the error bars that all other left-out cells give them, and which are known and inside."""
    times = times.assign(bar=math.inf)
    for (_, axis, _), group in times.groupby(["label", "axis", "group"]):
        errors = pooled_errors(left_out.drop(group.index))
        places = zip(group["name"], group["kind"], group["stretch"], strict=True)
        times.loc[group.index, "bar"] = [error_bar(errors, *place, axis == GPU) for place in places]
    inside = (times["stretch"] == 1) & (times["kind"] != "loss") & (times["axis"] != GPU)
    return times.assign(known=(times["bar"] <= LARGEST_ERROR) & (times["error"] < math.inf), inside=inside)


def _share(share: float) -> str:
    return MISSING if pd.isna(share) else f"{share:.1%}"
