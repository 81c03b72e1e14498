"""Planted defects of one rank's gradients are found at real numbers of columns, and right variants are never wrong."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from tests.support.defects import DEFECTS, IS_CAMPAIGN, LARGE_SEEDS, SEEDS, output_of_step, remember
from tests.support.entropy_loss import DTYPES
from tests.support.linear_loss import context, problem
from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tpbench.kernels import KERNEL_LOSSES
from tpbench.workloads.linear_loss import WORKLOAD, LinearLoss
from tpbench.workloads.linear_loss.bench import Oracle
from tpbench.workloads.losses import LARGEST_SCALE

SMALL_GAINS = ("128 columns 3% too large", "a scale of 1 + 2^-6")
"""Rounded logits may hide them in gradients of hidden states, of losses other than the cross-entropy, and of columns
without labels, but not in fp32."""

SMALL_COLUMN = 0.3
"""A column with less than this share of the mean norm may be lost in rounding, where terms of the loss cancel."""

Reasons = dict[str, list[str | None]]
"""By defect, why it is wrong, with the first inputs and with changed ones."""


def verdicts(here: Rank, cell: LinearLoss, names: list[str]) -> Reasons:
    """Return why the right output and those with defects of both gradients are wrong: changed inputs show the rest."""
    with mock.patch("tpbench.workloads.operation.gemm_tflops", return_value=1.0):
        session: Any = WORKLOAD.set_up(cell, WORKLOAD.variants["linear_gather"], context(here))
    found: Reasons = {}
    stale = None
    is_last = here.rank == here.world_size - 1
    for is_changed in (False, True):
        output = output_of_step(session, cell.seed if is_changed else None)
        oracle = Oracle(cell, session.inputs)
        remember(oracle, "log_probabilities", "products")
        outputs = dict.fromkeys(["right", *names], output)
        if is_last:
            for name in names:
                weight = DEFECTS[name](output.grad_weight.t()).t().contiguous()
                outputs[name] = replace(output, grad_hidden=DEFECTS[name](output.grad_hidden), grad_weight=weight)
        if is_changed and names:
            outputs["stale by one call"] = stale if is_last else output
        for name, spoiled in outputs.items():
            if name != "right" and all(any(found.get(f"{name} of the {of}", ())) for of in ("hidden states", "weight")):
                continue  # found with the first inputs
            wrong = oracle.compare(spoiled).wrong
            if name == "right":
                found.setdefault(name, []).append(wrong)
                continue
            for of, words in (("hidden states", "hidden"), ("weight", "weight")):
                reasons = [reason for reason in (wrong or "").split(" and ") if words in reason]
                found.setdefault(f"{name} of the {of}", []).append(" and ".join(reasons) or None)
        stale = output
    return found


def share_of_last_column(here: Rank, cell: LinearLoss) -> float:
    """Return the norm of the last column's gradient, on this rank, over the mean norm of its columns."""
    with mock.patch("tpbench.workloads.operation.gemm_tflops", return_value=1.0):
        session: Any = WORKLOAD.set_up(cell, WORKLOAD.variants["linear_gather"], context(here))
    norms = output_of_step(session, None).grad_weight.double().norm(dim=1)
    return float(norms[-1] / norms.mean())


@pytest.mark.parametrize("vocab", [1000, 32768, 131072, 151936])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss", ["cross_entropy", "reverse_kl", "total_variation"])
def test_each_defect_is_found_and_nothing_else(loss: str, dtype: str, vocab: int) -> None:
    if not enough_gpus(2):
        pytest.skip("needs 2 GPUs")
    if vocab > 1000 and not IS_CAMPAIGN:
        pytest.skip("takes minutes on CPUs")
    may_hide = [f"{name} of the hidden states" for name in SMALL_GAINS]
    may_hide += [f"{name} of the weight" for name in SMALL_GAINS[: 1 if loss == "cross_entropy" else 2]]
    may_hide = [] if dtype == "float32" else may_hide
    cell = problem(tokens=16, hidden=256, vocab=vocab, dtype=dtype, loss=loss)
    for seed in SEEDS if vocab == 1000 else LARGE_SEEDS:
        # One seed of the largest problem takes minutes on busy CPUs.
        found = run_on_ranks(2, verdicts, replace(cell, seed=seed), list(DEFECTS), timeout_s=1800.0)[0]
        assert found.pop("right") == [None, None], seed
        unseen = [name for name, wrong in found.items() if not any(wrong) and name not in may_hide]
        if unseen == ["last column of the weight"] and loss == "reverse_kl":  # rounding may explain a small column
            assert run_on_ranks(2, share_of_last_column, replace(cell, seed=seed))[-1] < SMALL_COLUMN, seed
            unseen = []
        assert not unseen, (seed, unseen)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss", KERNEL_LOSSES)
def test_a_right_variant_is_right_with_every_seed(loss: str, dtype: str) -> None:
    if not enough_gpus(2):
        pytest.skip("needs 2 GPUs")
    cell = problem(tokens=16, hidden=32, vocab=1000, dtype=dtype, loss=loss)
    for seed in SEEDS:
        steep = {"temperature": 1 / LARGEST_SCALE[dtype]} if seed % 2 and loss != "cross_entropy" else {}
        steeper = replace(cell, seed=seed, entropy=seed % 4 < 2, **steep)
        assert run_on_ranks(2, verdicts, steeper, [])[0]["right"] == [None, None], seed


def test_rounding_of_a_sum_over_many_columns_is_explained() -> None:
    """In fp32 it is the largest error where one column has most of the probability, and where terms cancel."""
    if not enough_gpus(2):
        pytest.skip("needs 2 GPUs")
    cell = problem(tokens=16, hidden=32, vocab=32768, dtype="float32", loss="reverse_kl")
    assert run_on_ranks(2, verdicts, cell, [])[0]["right"] == [None, None]
