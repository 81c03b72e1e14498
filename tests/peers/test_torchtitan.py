"""The integration of torchtitan: its losses, and ten steps of its chunked loss, since its trainer needs a GPU."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch

pytest.importorskip("torchtitan", reason="torchtitan is not installed")

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss

from tests.peers.compared import VOCAB, assert_close, gradients, labels, normal, ten_steps, whole
from tests.support.ranks import Rank, run_on_ranks
from tpbench.integrations.torchtitan import EntropyLoss

TOKENS, LABELS, COUNT = labels(2, 12, ignored=0), labels(2, 12), torch.tensor(11.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [None, COUNT])
def test_values_and_gradients_are_those_of_its_loss(dtype: torch.dtype, count: Any) -> None:
    logits = normal(2, 12, VOCAB, dtype=dtype)
    theirs = gradients(lambda x: CrossEntropyLoss.Config().build()(x, LABELS, count)[0], logits)
    for in_place in (False, True):
        loss_of = EntropyLoss.Config(in_place=in_place).build()
        assert_close(gradients(lambda x: loss_of(x * 1, LABELS, count)[0], logits), theirs, dtype)  # noqa: B023


def over_ranks(rank: Rank) -> list[Any]:
    """Return both losses with their gradients of plain shards and of DTensors."""
    from torchtitan.distributed import utils
    from torchtitan.distributed.spmd_types import set_current_spmd_mesh

    mesh = init_device_mesh(rank.device.type, (rank.world_size,), mesh_dim_names=("tp",))
    logits = normal(2, 12, VOCAB)
    dtensor = distribute_tensor(logits, mesh, [Shard(2)])
    replicated = distribute_tensor(LABELS, mesh, [Replicate()])
    answers = []
    cases = [(dtensor.to_local(), LABELS), (dtensor, LABELS), (dtensor, replicated)]
    for backend, (given, target) in zip(("spmd_types", "partial_dtensor", "full_dtensor"), cases, strict=True):
        utils._spmd_backend = backend
        with set_current_spmd_mesh(mesh) if backend == "spmd_types" else contextlib.nullcontext():
            both = []
            for kind in (CrossEntropyLoss, EntropyLoss):
                loss_of = kind.Config(global_vocab_size=VOCAB).build()
                loss, (grad,) = gradients(lambda x: loss_of(x, target, COUNT)[0], given)  # noqa: B023
                both.append([whole(loss), whole(grad)])
        answers.append(both)
    utils._spmd_backend = "spmd_types"
    return answers


def test_plain_shards_and_dtensors_have_its_losses() -> None:
    for theirs, ours in itertools.chain(*run_on_ranks(2, over_ranks)):
        assert_close(ours, theirs)


def trained(loss: Any) -> list[float]:
    torch.manual_seed(0)
    embedding, head = torch.nn.Embedding(VOCAB, 32), torch.nn.Linear(32, VOCAB, bias=False)
    body = torch.nn.Sequential(embedding, torch.nn.Linear(32, 32), torch.nn.GELU())
    loss_of = ChunkedLossWrapper.Config(num_chunks=3, loss_fn=loss).build()
    loss_of.set_lm_head(head)
    parameters = [*body.parameters(), *head.parameters()]
    return ten_steps(parameters, lambda: loss_of(body(TOKENS), LABELS, (LABELS >= 0).sum())[0])


def test_ten_steps_of_its_chunked_loss_have_its_losses() -> None:
    theirs = trained(CrossEntropyLoss.Config())
    assert theirs[-1] < theirs[0] - 0.1
    assert_close(trained(EntropyLoss.Config()), theirs)
