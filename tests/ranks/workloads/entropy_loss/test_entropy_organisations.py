"""The organisations of the kernels as an option of triton_tp: right, refused where they cannot be, told in the row."""

from __future__ import annotations

import itertools
from typing import Any

import pandas as pd
import pytest
import torch

from tests.support.entropy_loss import LOSSES, context, problem
from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tpbench.job import Job, refusal
from tpbench.launcher.target import ThisHost, skip_reason
from tpbench.measure.session import Verdict
from tpbench.settings import JobError
from tpbench.workloads.entropy_loss import WORKLOAD, EntropyLoss
from tpbench.workloads.entropy_loss.bench import setup
from tpbench.workloads.entropy_loss.winners import choose

ORGANISATIONS = ("fused", "cached", *(("one_pass",) if torch.cuda.is_available() else ()))


def ran(cell: EntropyLoss, here: Rank | None = None) -> tuple[Verdict, int]:
    session = setup(cell, WORKLOAD.variants["triton_tp"], context(here))
    session.step()
    return session.check(), session.costs.bytes_communicated


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("organisation", ORGANISATIONS)
def test_each_is_right_and_says_that_it_ran(organisation: Any, loss: Any) -> None:
    for block_cap, vocab in itertools.product(("auto", 4096), (264, 9000)):
        cell = problem(loss=loss, vocab=vocab, tokens=5, organisation=organisation, block_cap=block_cap)
        verdict, sent = ran(cell)
        assert verdict.wrong is None and sent == 0
        assert verdict.columns["organisation_used"] == organisation
        assert verdict.columns["block_used"] <= (16384 if block_cap == "auto" else 4096)
        compiled = {"registers", "spilled_bytes", "shared_kib", "occupancy"} & verdict.columns.keys()
        assert len(compiled) == (4 if torch.cuda.is_available() else 0)  # the interpreter compiles nothing


def on_ranks(here: Rank, cell: EntropyLoss) -> tuple[Verdict, int]:
    return ran(cell, here)


def test_over_ranks_the_cached_one_is_the_one() -> None:
    if not enough_gpus(2):
        pytest.skip("needs 2 GPUs")
    for organisation in ("auto", "cached"):
        for verdict, sent in run_on_ranks(2, on_ranks, problem(organisation=organisation, exchange="nccl")):
            assert verdict.wrong is None and verdict.columns["organisation_used"] == "cached"
            assert sent == 13 * 3 * 4


@pytest.mark.parametrize(
    ("fields", "tp_size", "device", "said"),
    [
        ({"organisation": "fused"}, 2, "cuda", "over ranks the exchange lies between"),
        ({"organisation": "cached", "exchange": "symmetric"}, 2, "cuda", "is exchange=nccl, got exchange=symmetric"),
        ({"organisation": "one_pass", "exchange": "nccl"}, 2, "cuda", "is exchange=symmetric, got exchange=nccl"),
        ({"organisation": "one_pass"}, 1, "cpu", "needs a CUDA GPU"),
        ({"exchange": "symmetric"}, 2, "cpu", "needs a CUDA GPU"),
        ({"organisation": "fused"}, 1, "cpu", None),
        ({"organisation": "cached"}, 2, "cpu", None),
    ],
)
def test_what_cannot_be_is_skipped_with_a_reason(
    fields: dict[str, Any], tp_size: int, device: Any, said: str | None
) -> None:
    job = Job(variant="triton_tp", tp_size=tp_size, device=device, problem=problem(**fields))
    found = skip_reason(job, ThisHost(8))
    assert found is None if said is None else said in str(found)


def test_it_is_an_option_of_our_kernels_alone() -> None:
    job = Job(variant="pytorch_gather", tp_size=1, problem=problem(organisation="fused"))
    assert "taken by: triton_tp" in str(refusal(job))


def rows(*changes: dict[str, Any]) -> pd.DataFrame:
    plain = {
        "variant": "triton_tp", "status": "ok", "loss": "cross_entropy", "vocab": 65536, "tp_size": 2, "tokens": 4096,
        "dtype": "bfloat16", "gpu_name": "NVIDIA H200", "torch_version": "2.11.0", "triton_version": "3.6.0",
        "organisation": "cached", "block_cap": "8192", "device_ms": 0.2,
    }  # fmt: skip
    return pd.DataFrame([{**plain, **change} for change in changes])


def test_the_fastest_cap_wins() -> None:
    chosen = choose(
        rows(
            {"device_ms": 0.05},  # measured again below
            {"block_cap": "16384", "device_ms": 0.1},
            {"block_cap": "auto", "device_ms": 0.01},
            {"block_cap": "4096", "device_ms": 0.02, "status": "wrong"},
            {"block_cap": "32768", "device_ms": None},
            {"variant": "pytorch_gather", "device_ms": 0.01},
            {"organisation": "fused", "tp_size": 1},
            {"device_ms": 0.3},
        ),
        "here",
    )
    assert chosen["measured_on"] == {
        "gpu_name": "NVIDIA H200", "torch_version": "2.11.0", "triton_version": "3.6.0", "tokens": 4096,
        "dtype": "bfloat16",
    }  # fmt: skip
    cached, fused = chosen["winners"]
    assert (cached["columns"], cached["block_cap"], cached["device_ms"]) == (32768, 16384, 0.1)
    assert cached["tried"] == [8192, 16384]
    assert (fused["organisation"], fused["columns"], fused["block_cap"]) == ("fused", 65536, 8192)


def test_rows_that_decide_nothing() -> None:
    with pytest.raises(JobError, match="no measured rows"):
        choose(rows({"organisation": "auto"}), "here")
    with pytest.raises(JobError, match="differ in gpu_name"):
        choose(rows({}, {"gpu_name": "NVIDIA A100"}), "here")
