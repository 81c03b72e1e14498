"""`tpbench predict --validate`: how well cells are predicted that were left out of the fit."""

import math
from collections.abc import Collection

import pandas as pd

from tpbench.predict.model import COUNTED, ERROR_BAR_SHARE, LARGEST_ERROR, TIMES, pooled_errors
from tpbench.tables import MISSING, Document, Table

LEAST_COVERAGE, LEAST_KNOWN, LARGEST_BAR, LARGEST_COUNT_ERROR = 0.85, 0.8, 0.15, 0.03
"""Aims of the validation: the share of true times within their error bars, the share of cells inside the measured range
that have a number, the median error bar of these, and the median error of memory and sent bytes of each variant."""


def validation(left_out: pd.DataFrame, labels: Collection[str], gpu: str) -> tuple[Document, bool]:
    """Return tables of how well the variants' left-out cells are predicted, and true if they reach the aims."""
    columns = ("left out", "times", "inside", "predicted", "within +-", "of inside", "median +-")
    times, rows, reached = _times(left_out[left_out["label"].isin(labels)], left_out), [], True
    for axis, what in (("size", "a size"), ("tp", "a number of ranks")):
        lines = times[times["axis"] == axis]
        inside, known = lines[lines["inside"]], lines[lines["bar"] <= LARGEST_ERROR]
        within, of_inside = (known["error"] <= known["bar"]).mean(), (inside["bar"] <= LARGEST_ERROR).mean()
        reached &= not (within < LEAST_COVERAGE or of_inside < LEAST_KNOWN)
        shares = (within, of_inside, known.loc[known["inside"], "bar"].median())
        rows.append([what, *(str(len(part)) for part in (lines, inside, known)), *map(_share, shares)])
    reached &= not times.loc[times["inside"] & (times["bar"] <= LARGEST_ERROR), "bar"].median() > LARGEST_BAR
    rows.append(["aim", "", "", "", *map(_share, (LEAST_COVERAGE, LEAST_KNOWN, LARGEST_BAR))])
    medians = left_out[left_out["label"].isin(labels)].groupby("label")[[*COUNTED]].median().max()
    reached &= not (medians > LARGEST_COUNT_ERROR).any()
    counts = [f"largest median error of a variant's {name}: {_share(error)}" for name, error in medians.items()]
    caption = (
        f"wall and device times on {gpu}, predicted from the other cells of their variant; inside: cells of their loss "
        f"have less and more of each size; +- promises {ERROR_BAR_SHARE:.0%}"
    )
    table = Table("", columns, rows, notes=counts, keys=1)
    return Document([table], caption, [f"the aims are {'' if reached else 'not '}reached"]), bool(reached)


def _times(lines: pd.DataFrame, left_out: pd.DataFrame) -> pd.DataFrame:
    """Return the error of each time, with the error bar that all other cells that were left out give it."""
    times = []
    for _, group in lines.groupby(["label", "axis", "group"]):
        errors = pooled_errors(left_out.drop(group.index))
        for line in group.to_dict("records"):
            for name in TIMES:
                bar = errors.get((line["kind"], name), math.inf) * line["stretch"]
                times.append({"axis": line["axis"], "inside": line["inside"], "error": line[name], "bar": bar})
    return pd.DataFrame(times, columns=["axis", "inside", "error", "bar"]).dropna(subset="error")


def _share(share: float) -> str:
    return MISSING if pd.isna(share) else f"{share:.1%}"
