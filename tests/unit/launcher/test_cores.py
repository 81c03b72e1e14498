"""Limit of ranks for each CPU core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tpbench.launcher.planning.plan import Cell, Request, ThisHost, plan
from tpbench.settings import JobError

CONF = Path(__file__).resolve().parents[3] / "conf"


def cells(*sizes: int, host: ThisHost, **values: Any) -> list[Cell]:
    base = {"variant": "triton_tp", "tokens": 64, "vocab": 1000, **values}
    return plan([Request(at, {**base, "tp_size": size}, [], [CONF]) for at, size in enumerate(sizes)], host)


REASON = "64 ranks would share 2 CPU cores, and max_ranks_per_core=8 allows 16: set max_ranks_per_core=32 to run them"


def test_a_job_with_too_many_ranks_is_refused() -> None:
    with pytest.raises(JobError) as caught:
        cells(64, host=ThisHost(0, cores=2))
    assert str(caught.value) == f"triton_tp: {REASON}"


def test_in_a_mixed_sweep_it_is_skipped() -> None:
    assert [each.skip_reason for each in cells(16, 64, host=ThisHost(0, cores=2))] == [None, REASON]


def test_the_proposed_override_allows_it() -> None:
    (cell,) = cells(64, host=ThisHost(0, cores=2, max_ranks_per_core=32))
    assert cell.skip_reason is None


def test_ranks_on_gpus_are_not_counted() -> None:
    (cell,) = cells(64, host=ThisHost(64, cores=2))
    assert cell.skip_reason is None


def test_one_core_is_enough_for_the_largest_shape() -> None:
    (cell,) = cells(8, host=ThisHost(0, cores=1))
    assert cell.skip_reason is None
