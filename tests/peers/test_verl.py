"""The integration of verl beside its torch backend: its Triton kernels and its trainers need a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("verl", reason="verl is not installed")

from tests.peers.compared import VOCAB, assert_close, gradients, labels, normal, ten_steps, tiny_model, weighted
from tests.support.ranks import Rank, run_on_ranks
from tpbench.integrations import verl as integration

HIDDEN, WEIGHT, LABELS = normal(2, 12, 32), normal(VOCAB, 32, seed=1), labels(2, 12, ignored=0)


def current(hidden: Tensor, weight: Tensor, group: Any = None) -> tuple[Tensor, Tensor]:
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(hidden, weight, LABELS, 0.7, "none", group)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_and_gradients_are_those_of_its_torch_backend(dtype: torch.dtype) -> None:
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    tensors = [HIDDEN.to(dtype), WEIGHT.to(dtype)]
    torch_backend = FusedLinearForPPO()
    with integration.patched():
        values, expected = current(*tensors), torch_backend(*tensors, LABELS, 0.7)
        assert_close(values, [each.flatten() for each in expected], dtype)
        ours = gradients(lambda *x: weighted(*current(*x)), *tensors)
    theirs = gradients(lambda *x: weighted(*torch_backend(*x, LABELS, 0.7)), *tensors)
    assert_close(ours[1], theirs[1], dtype)
    rows = torch.linspace(0.5, 2, 24)
    logprobs, _ = integration.linear_cross_entropy(*tensors, LABELS, rows)
    truth = ((HIDDEN.to(dtype) @ WEIGHT.to(dtype).T).flatten(0, 1).float() / rows[:, None]).log_softmax(1)
    assert_close(logprobs, truth[range(24), LABELS.flatten()], dtype)


def over_ranks(rank: Rank) -> Any:
    columns = VOCAB // rank.world_size
    shard = WEIGHT[rank.rank * columns :][:columns]
    with integration.patched():
        loss, (hidden, weight) = gradients(lambda *x: weighted(*current(*x, rank.group)), HIDDEN, shard)
    torch.distributed.all_reduce(hidden)  # as verl's own function, each rank returns a part
    return loss, hidden, weight


def test_two_ranks_share_the_vocabulary() -> None:
    with integration.patched():
        loss, (hidden, weight) = gradients(lambda *x: weighted(*current(*x)), HIDDEN, WEIGHT)
    answers = run_on_ranks(2, over_ranks)
    for ours in answers:
        assert_close(ours[:2], (loss, hidden))
    assert_close(torch.cat([ours[2] for ours in answers]), weight)


def trained(forward: Any) -> list[float]:
    from verl.trainer.ppo.core_algos import compute_policy_loss

    model, advantages, old = tiny_model(), normal(2, 12, seed=7), normal(2, 12, seed=8) - 5

    def loss() -> Tensor:
        output = forward(model, input_ids=LABELS, temperature=0.7, return_dict=True)
        policy = compute_policy_loss(old, output.log_probs.view(2, 12), advantages, torch.ones(2, 12), cliprange=0.2)
        return policy[0] - 0.01 * output.entropy.mean()

    return ten_steps(model.parameters(), loss, 1e-3)


def test_ten_steps_of_ppo_have_the_losses_of_its_torch_backend() -> None:
    from verl.models.transformers import dense_common

    theirs = trained(dense_common.forward_with_torch_backend)
    with integration.patched():
        ours = trained(dense_common.forward_with_triton_backend)
    assert theirs[-1] < theirs[0] - 0.1
    assert_close(ours, theirs)
