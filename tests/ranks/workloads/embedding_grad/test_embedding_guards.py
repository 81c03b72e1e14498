"""Errors that must never pass silently, and the details of a row."""

from typing import Any

import pytest

from tests.support.embedding_grad import FixedStopwatch, new_session, prepared, problem, run
from tests.support.ranks import Rank, enough_gpus, run_on_ranks

pytestmark = pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs, or none")


def details_of(here: Rank) -> tuple[dict[str, Any], str | None]:
    """Return a row's columns in a training step, and the verdict after one rank has a wrong index.

    Each measured time is 1 ms, and the whole iteration takes 20 ms.
    """
    fields = {"overlap_ms": 1.0, "other_mib": 0.01, "other_count": 2}
    cell = problem(distribution="zipf_bigram", index="early", search="host", **fields)
    session = new_session(here, cell, "sparse_all_to_all")
    stopwatch: Any = FixedStopwatch()
    session.stopwatch = stopwatch
    session.step()
    verdict = session.check()
    assert verdict.wrong is None, verdict
    details = session.details({**verdict.columns, "copy_gb_per_s": 400.0, "time_ms": 20.0})
    session.restore()
    session.step()
    if here.rank == 1:
        session.inputs.other_work.index.rows[0, 3] += 1
    return details, session.check().wrong


def test_details_leave_out_what_runs_beside_the_exchange() -> None:
    for details, wrong in run_on_ranks(2, details_of):
        for name in ("stand_in", "others", "index", "counts", "ids", "gather", "values", "merge"):
            assert details[f"{name}_ms"] == 1.0
        assert details["exposed_ms"] == 19.0
        assert wrong == "1 rows of the forward pass's index are wrong"


def outcome_of_wrong_rows(here: Rank) -> str:
    """Return "right", or the error, if rank 0 sends row 2, which is its own, to rank 1."""
    _, comm, exchange = prepared(here, problem(distribution="fixed"), "sparse_all_to_all")
    finder: Any = exchange.finder  # type: ignore[attr-defined]
    if here.rank == 0:
        to_rank_1, rows = finder.find()[1], finder.rows()
        rows[:to_rank_1] = 2
        finder.rows = lambda: rows
    try:
        run(exchange, comm)
    except RuntimeError as error:
        return str(error)
    return "right"


def test_rows_of_other_owners_are_an_error() -> None:
    assert run_on_ranks(2, outcome_of_wrong_rows) == ["right", "rank 1 was sent rows that it does not own"]
