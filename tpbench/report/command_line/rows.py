"""Rows that a command was pointed at. Warnings about files go to stderr."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

import pandas as pd

from tpbench.report.numbers.metric import Metric, metrics_of_all
from tpbench.results.read import RowWarning, load
from tpbench.settings import JobError


def read_rows(places: Sequence[str]) -> pd.DataFrame:
    """Return the rows in `places`: folders, files or globs. Raises JobError if there are none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RowWarning)
        try:
            frame = load(places)
        except FileNotFoundError as error:
            raise JobError(f"{error}: run `python -m tpbench ...` first, or name the folder") from None
    for warning in caught:
        print(f"report: warning: {warning.message}", file=sys.stderr)
    if frame.empty:
        raise JobError(f"no rows in {', '.join(places)}: run `python -m tpbench ...` first")
    return frame


def require_values(frame: pd.DataFrame, shown: Metric, where: str = "") -> None:
    """Raise JobError if no correct row has the metric. If no row is correct, a report shows the failures."""
    measured = frame[frame["status"] == "ok"]
    present = [name for name in metrics_of_all() if name in measured and measured[name].notna().any()]
    if measured.empty or shown.name in present:
        return
    raise JobError(f"no row{where and f' of {where}'} has {shown.name} ({shown.doc}); they have: {', '.join(present)}")
