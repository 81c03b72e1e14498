"""Check that rows have the metric that a user asks for."""

from __future__ import annotations

import pandas as pd

from tpbench.report.metric import Metric, metrics_of_all
from tpbench.settings import JobError


def require_values(frame: pd.DataFrame, shown: Metric, where: str = "") -> None:
    """Raise JobError if no correct row has the metric. If no row is correct, a report shows the failures."""
    measured = frame[frame["status"] == "ok"]
    present = [name for name in metrics_of_all() if name in measured and measured[name].notna().any()]
    if measured.empty or shown.name in present:
        return
    raise JobError(f"no row{where and f' of {where}'} has {shown.name} ({shown.doc}); they have: {', '.join(present)}")
