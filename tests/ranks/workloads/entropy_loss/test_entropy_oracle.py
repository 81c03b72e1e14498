"""The oracle on two ranks: an error on one of them is detected on all."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.entropy_loss import context, problem, right
from tests.support.ranks import Rank, enough_gpus, run_on_ranks
from tpbench.workloads.entropy_loss import EntropyLoss
from tpbench.workloads.entropy_loss.bench import Oracle
from tpbench.workloads.entropy_loss.inputs import Output, Shard, make_shard


def local_softmax(cell: EntropyLoss, shard: Shard, output: Output) -> Output:
    """Return the gradient of a softmax over the shard alone."""
    local = Oracle(cell, replace(shard, group=None))
    return replace(output, grad=right(local).grad)


def local_maximum(cell: EntropyLoss, shard: Shard, output: Output) -> Output:
    """Return a gradient with exponents from the shard's maximum and sums as if from the whole vocabulary's."""
    local_max, whole_max = (shard.logits.double().amax(1) for _ in range(2))
    if shard.group is not None:
        torch.distributed.all_reduce(whole_max, torch.distributed.ReduceOp.MAX, group=shard.group)
    grad = output.grad.double() * (whole_max - local_max).exp()[:, None]
    return replace(output, grad=grad.to(output.grad.dtype))


def with_element(values: Tensor, place: Any, new: Any) -> Tensor:
    """Return a copy with another value at one place."""
    values = values.clone()
    values[place] = new
    return values


def row_losses(output: Output) -> Tensor:
    """Return the loss of each row."""
    assert output.row_loss is not None
    return output.row_loss


def next_number(value: Tensor) -> Tensor:
    """Return the smallest number of the dtype that is larger."""
    return torch.nextafter(value, value + 1)


ON_ALL_RANKS: dict[str, Callable[[EntropyLoss, Shard, Output], Output]] = {
    "none": lambda cell, shard, output: output,
    "local softmax": local_softmax,
    "local maximum": local_maximum,
}
"""Errors of every rank. They may communicate."""

ON_LAST_RANK: dict[str, Callable[[Output], Output]] = {
    "one rank's row": lambda output: replace(output, grad=with_element(output.grad, 2, output.grad[2] * 2)),
    "one rank's NaN": lambda output: replace(output, grad=with_element(output.grad, (2, 2), torch.nan)),
    "one rank's loss": lambda output: replace(output, loss=output.loss * 1.01),
    "last bit": lambda output: replace(
        output, row_loss=with_element(row_losses(output), 3, next_number(row_losses(output)[3]))
    ),
    "one rank's shape of the loss": lambda output: replace(output, loss=output.loss.repeat(2)),
    "one rank's number of rows": lambda output: replace(output, row_loss=row_losses(output).repeat(2)),
    "one rank's missing rows": lambda output: replace(output, row_loss=None),  # a variant need not return them
}
"""Errors of the last rank alone."""


def compared(here: Rank, cell: EntropyLoss, error: str) -> tuple[bool, str | None]:
    """Return whether the losses of the ranks are identical, and the oracle's complaint about the planted error."""
    shard = make_shard(cell, context(here))
    oracle = Oracle(cell, shard)
    output = right(oracle)
    if error in ON_ALL_RANKS:
        output = ON_ALL_RANKS[error](cell, shard, output)
    elif here.rank == here.world_size - 1:
        output = ON_LAST_RANK[error](output)
    errors = oracle.compare(output)
    return errors.columns["loss_identical"], errors.wrong


RIGHT = ("none", "last bit", "one rank's missing rows")
DIFFERENT_LOSSES = (
    "last bit", "one rank's loss", "one rank's shape of the loss", "one rank's number of rows",
    "one rank's missing rows",
)  # fmt: skip


@pytest.mark.parametrize("error", [*ON_ALL_RANKS, *ON_LAST_RANK])
@pytest.mark.parametrize("loss", ["cross_entropy", "reverse_kl"])
def test_an_error_on_one_rank_is_detected_on_all(loss: str, error: str) -> None:
    if not enough_gpus(2):
        pytest.skip("needs 2 GPUs")
    (identical, complaint), other = run_on_ranks(2, compared, problem(loss=loss), error)
    assert (identical, complaint) == other
    assert (complaint is None) == (error in RIGHT)
    assert identical == (error not in DIFFERENT_LOSSES)
