"""The oracle on two ranks: an error on one of them is detected on all."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.support.entropy_loss import context, problem, right
from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tpbench.workloads.entropy_loss import EntropyLoss
from tpbench.workloads.entropy_loss.inputs import make_shard
from tpbench.workloads.entropy_loss.oracle import Oracle


def _planted_on_ranks(here: Rank, cell: EntropyLoss, error: str) -> tuple[bool, str | None]:
    shard = make_shard(cell, context(here))
    oracle = Oracle(cell, shard)
    output = right(oracle)
    last = here.rank == here.world_size - 1
    if error == "local softmax":
        lone = dataclasses.replace(shard, group=None)
        local = Oracle(dataclasses.replace(cell), lone)
        output = dataclasses.replace(output, grad=right(local).grad)
    elif error == "local maximum":
        # Exponents from the shard's maximum, sums as if from the whole vocabulary's.
        local_max, whole_max = (shard.logits.double().amax(1) for _ in range(2))
        if shard.group is not None:
            torch.distributed.all_reduce(whole_max, torch.distributed.ReduceOp.MAX, group=shard.group)
        grad = output.grad.double() * (whole_max - local_max).exp()[:, None]
        output = dataclasses.replace(output, grad=grad.to(output.grad.dtype))
    elif error == "one rank's row" and last:
        output.grad[2] *= 2
    elif error == "one rank's NaN" and last:
        output.grad[2, 2] = torch.nan
    elif error == "one rank's loss" and last:
        output = dataclasses.replace(output, loss=output.loss * 1.01)
    elif error == "last bit" and last:
        assert output.row_loss is not None
        output.row_loss[3] = torch.nextafter(output.row_loss[3], output.row_loss[3] + 1)
    elif error == "one rank's shape of the loss" and last:
        output = dataclasses.replace(output, loss=output.loss.repeat(2))
    elif error == "one rank's number of rows" and last:
        assert output.row_loss is not None
        output = dataclasses.replace(output, row_loss=output.row_loss.repeat(2))
    elif error == "one rank's missing rows" and last:  # a variant need not return them
        output = dataclasses.replace(output, row_loss=None)
    errors = oracle.compare(output)
    return errors.loss_identical, errors.complaint(cell)


RIGHT = ("none", "last bit", "one rank's missing rows")
DIFFERENT_LOSSES = (
    "last bit", "one rank's loss", "one rank's shape of the loss", "one rank's number of rows",
    "one rank's missing rows",
)  # fmt: skip


@pytest.mark.parametrize(
    "error",
    ["none", "local softmax", "local maximum", "one rank's row", "one rank's NaN", *DIFFERENT_LOSSES],
)
@pytest.mark.parametrize("loss", ["cross_entropy", "reverse_kl"])
def test_an_error_on_one_rank_is_detected_on_all(loss: str, error: str) -> None:
    if not enough_gpus(2):
        pytest.skip("needs 2 GPUs")
    (identical, complaint), other = run_on_ranks(2, _planted_on_ranks, problem(loss=loss), error)
    assert (identical, complaint) == other
    assert (complaint is None) == (error in RIGHT)
    assert identical == (error not in DIFFERENT_LOSSES)
