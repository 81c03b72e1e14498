"""Errors that must never pass silently: lost rows, rows of other owners, wrong sums, wrong byte counts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.support.embedding_grad import HERE, FixedStopwatch, context, new_session, prepared, problem, run
from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tpbench.workloads.embedding_grad.bench import EmbeddingGradSession
from tpbench.workloads.embedding_grad.inputs import EmbeddingGradInputs
from tpbench.workloads.embedding_grad.oracle import LostRows
from tpbench.workloads.embedding_grad.traffic.collectives import CountedCollectives, LinkRates, measure_link_rates

pytestmark = pytest.mark.skipif(not enough_gpus(2), reason="needs 2 GPUs, or none")


def errors_of_lost_rows(here: Rank, name: str) -> list[str]:
    """Return the errors if rank 1's backward pass touched a row that its mask does not have."""
    messages = []
    for lost in (3, 90):  # a row of rank 0, and one of rank 1
        inputs = EmbeddingGradInputs(problem(distribution="none"), context(here))
        if here.rank == 1:
            inputs.grad[lost] = 1.0
        session = new_session(here, inputs.problem, name, inputs)
        session.step()
        try:
            session.check()
        except LostRows as error:
            messages.append(str(error))
    return messages


@pytest.mark.parametrize("name", sorted({"sparse_all_to_all", "sparse_all_gather", "sparse_symmetric"} & set(HERE)))
def test_a_row_outside_the_mask_is_an_error_on_every_rank(name: str) -> None:
    for messages in run_on_ranks(2, errors_of_lost_rows, name):
        assert messages == [f"rank 1 has 1 touched rows outside the mask, the first is row {row}" for row in (3, 90)]


def stepped(here: Rank) -> EmbeddingGradSession:
    """Return a session after one step."""
    session = new_session(here, problem(search="host"), "sparse_all_to_all")
    session.step()
    return session


def wrong_verdicts(here: Rank) -> list[str | None]:
    """Return what is wrong if rank 0's result has a wrong row, and if rank 0 sent 8 bytes too many."""
    wrong_row = stepped(here)
    if here.rank == 0:
        wrong_row.exchange.result()[5] += 1.0
    wrong_count = stepped(here)
    wrong_count.comm.sent_bytes[1] += 8 * (here.rank == 0)
    return [wrong_row.check().wrong, wrong_count.check().wrong]


def test_an_error_of_one_rank_is_known_to_every_rank() -> None:
    for wrong_row, wrong_count in run_on_ranks(2, wrong_verdicts):
        assert "grad_error" in wrong_row
        assert "by the formula" in wrong_count


def rates_after_a_hiccup(here: Rank) -> tuple[LinkRates, float]:
    """Return link rates if the first series takes ten times as long as it should, and the correct latency."""
    inputs = EmbeddingGradInputs(problem(), context(here))
    times_ms = iter([0.1, *itertools.repeat(0.01, 10)])

    class HiccupStopwatch:
        def ms(self, run: Any, restore: Any = None, *, on_host: bool = False) -> float:
            run()
            return next(times_ms)

        def samples_ms(self, run: Any) -> list[float]:
            return [self.ms(run)]

    stopwatch: Any = HiccupStopwatch()
    comm = CountedCollectives(here.group, here.rank, here.world_size)
    return measure_link_rates(inputs, comm, stopwatch), 0.01


def test_a_hiccup_is_not_the_latency() -> None:
    for rates, latency_ms in run_on_ranks(2, rates_after_a_hiccup):
        assert rates.latency_ms == latency_ms


def predictions(here: Rank) -> list[tuple[dict[str, Any], float]]:
    """Return a row's columns and its predicted crossover on two machines, one with a slower all-to-all."""
    found = []
    stopwatch: Any = FixedStopwatch()
    for slower in (1, 2):
        session = stepped(here)
        session.stopwatch = stopwatch
        session.link_rates = LinkRates(90.0 / slower, 50.0 + 10 * slower, 1e-6 * slower, 40.0 / slower, 99.0)
        columns = {**session.check().columns, "copy_gb_per_s": 300.0 + 100 * slower, "time_ms": 1.0}
        found.append((columns, session.details(columns)["predicted_crossover"]))
    return found


def test_the_crossover_is_predicted_from_the_rows_own_link_rates() -> None:
    for found in run_on_ranks(2, predictions):
        for row, predicted in found:
            byte = (1 + 4 / 24) / row["all_to_all_gb_per_s"] + 5 / row["copy_gb_per_s"]
            byte += 4 / 24 * 2 / row["upload_gb_per_s"]
            waiting = 5 * row["latency_ms"] * 1e6 / (101 * 24 / 2)
            assert predicted == pytest.approx((1 / row["reduce_scatter_gb_per_s"] - waiting) / byte)
        assert 0 < found[1][1] < found[0][1] < 1


def error_of_own_rows(here: Rank) -> str:
    comm = CountedCollectives(here.group, here.rank, here.world_size)
    with pytest.raises(ValueError) as error:
        comm.all_to_all(torch.empty(2, 3), torch.zeros(2, 3), [1, 1], [1, 1])
    return str(error.value)


def test_own_rows_cannot_be_sent() -> None:
    for message in run_on_ranks(2, error_of_own_rows):
        assert "would send itself 1 rows" in message


def outcome_of_wrong_rows(here: Rank, merge: str) -> str:
    """Return "right", or the type of the error, if rank 0 sends row 2, which is its own, to rank 1."""
    _, comm, exchange = prepared(here, problem(merge=merge, distribution="fixed"), "sparse_all_to_all")
    finder: Any = exchange.finder  # type: ignore[attr-defined]
    find = finder.find

    def find_wrong_rows() -> Any:
        touched = find()
        if here.rank == 0:
            touched.rows[: touched.counts[1]] = 2
        return touched

    finder.find = find_wrong_rows
    try:
        run(exchange, comm)
    except (RuntimeError, IndexError) as error:
        return type(error).__name__
    return "right"


@pytest.mark.parametrize("merge", ["triton", "index_add"])
def test_rows_of_other_owners_are_an_error(merge: str) -> None:
    if merge == "index_add" and torch.cuda.is_available():
        pytest.skip("the error ends the process's CUDA context")
    first, second = run_on_ranks(2, outcome_of_wrong_rows, merge)
    assert first == "right" and second in ("MisplacedRow", "IndexError", "RuntimeError")
