"""Committed rows of the train step."""

from __future__ import annotations

from tests.support.command import ROOT
from tpbench.report.analysis.records import row_records
from tpbench.report.analysis.verdicts import disagreements
from tpbench.results.current_rows import newest
from tpbench.results.read import load


def test_committed_rows_train_stably() -> None:
    """Losses fall without a peak, and rows of one problem agree."""
    rows = load(ROOT / "outputs/reference", workload="train_step", status="ok")
    assert len(rows) and all(losses[-1] < losses[0] for losses in rows["losses"])
    assert all(max(losses) <= losses[0] * 1.0005 for losses in rows["losses"])
    assert not disagreements(row_records(newest(rows)))
