"""The option `algorithm` of triton_tp: each is right or skipped with a reason, and the row says which ran."""

import itertools
from typing import Any

import pytest
import torch

from tests.support.entropy_loss import LOSSES, context, problem
from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tpbench.job import Job
from tpbench.kernels import COMPARING_LOSSES
from tpbench.launcher.planning.plan import ThisHost, skip_reason
from tpbench.measure.session import Verdict
from tpbench.workloads.entropy_loss import WORKLOAD, EntropyLoss

ALGORITHMS = ("two_reads", "two_kernels", *(("one_read",) if torch.cuda.is_available() else ()))


def ran(cell: EntropyLoss, here: Rank | None = None) -> tuple[Verdict, int]:
    session = WORKLOAD.set_up(cell, WORKLOAD.variants["triton_tp"], context(here))
    session.step()
    return session.check(), session.costs.bytes_communicated


@pytest.mark.parametrize("loss", sorted({*LOSSES} - {*COMPARING_LOSSES}))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_each_algorithm_is_correct_and_named_in_the_row(algorithm: Any, loss: Any) -> None:
    for block_cap, vocab in itertools.product(("auto", 4096), (264, 9000)):
        cell = problem(loss=loss, vocab=vocab, tokens=5, algorithm=algorithm, block_cap=block_cap)
        verdict, sent = ran(cell)
        assert verdict.wrong is None and sent == 0
        assert verdict.columns["algorithm_used"] == algorithm
        assert verdict.columns["block_used"] <= (16384 if block_cap == "auto" else 4096)
        compiled = {"registers", "spilled_bytes", "shared_kib", "occupancy"} & verdict.columns.keys()
        assert len(compiled) == (4 if torch.cuda.is_available() else 0)  # the interpreter compiles nothing


def on_ranks(here: Rank, cell: EntropyLoss) -> tuple[Verdict, int]:
    return ran(cell, here)


def test_exchange_nccl_over_ranks_runs_two_kernels() -> None:
    if not enough_gpus(2):
        pytest.skip("needs 2 GPUs")
    for algorithm in ("auto", "two_kernels"):
        for verdict, sent in run_on_ranks(2, on_ranks, problem(algorithm=algorithm, exchange="nccl")):
            assert verdict.wrong is None and verdict.columns["algorithm_used"] == "two_kernels"
            assert sent == 13 * 3 * 4


@pytest.mark.parametrize(
    ("fields", "tp_size", "device", "said"),
    [
        ({"algorithm": "two_reads"}, 2, "cuda", "over ranks the exchange lies between"),
        ({"algorithm": "two_kernels", "exchange": "symmetric"}, 2, "cuda", "is exchange=nccl, got exchange=symmetric"),
        ({"algorithm": "one_read", "exchange": "nccl"}, 2, "cuda", "is exchange=symmetric, got exchange=nccl"),
        ({"algorithm": "one_read"}, 1, "cpu", "needs a CUDA GPU"),
        ({"exchange": "symmetric"}, 2, "cpu", "needs a CUDA GPU"),
        ({"algorithm": "two_reads"}, 1, "cpu", None),
        ({"algorithm": "two_kernels"}, 2, "cpu", None),
    ],
)
def test_unsupported_combinations_are_skipped_with_a_reason(
    fields: dict[str, Any], tp_size: int, device: Any, said: str | None
) -> None:
    job = Job(variant="triton_tp", tp_size=tp_size, device=device, problem=problem(**fields))
    found = skip_reason(job, ThisHost(8))
    assert found is None if said is None else said in str(found)
