"""The committed rows of the train step train stably."""

from __future__ import annotations

import pandas as pd
import pytest

from tests.support.command import ROOT
from tpbench.report.analysis.agreement import frame_warnings
from tpbench.results.read import load


@pytest.fixture(scope="module", params=["reference", "options"])
def rows(request: pytest.FixtureRequest) -> pd.DataFrame:
    return load(ROOT / "outputs" / request.param, workload="train_step", status="ok")


def test_losses_of_every_committed_row_fall(rows: pd.DataFrame) -> None:
    assert len(rows) and all(losses[-1] < losses[0] for losses in rows["losses"])


def test_rows_with_the_default_learning_rate_never_exceed_their_first_loss(rows: pd.DataFrame) -> None:
    stable = rows[rows["learning_rate"] == 1e-5]
    assert len(stable) and all(max(losses) <= losses[0] * 1.0005 for losses in stable["losses"])


def test_no_two_committed_rows_of_a_problem_diverge(rows: pd.DataFrame) -> None:
    assert not frame_warnings(rows)
