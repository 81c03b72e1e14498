"""The integration of Megatron-core: its losses at one and two ranks, and ten steps of its model."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from tests.peers.compared import VOCAB, assert_close, gradients, labels, normal, ten_steps
from tests.support.ranks import Rank, run_on_ranks
from tpbench.integrations import megatron as integration

PADDED = 8
TOKENS, LABELS = labels(2, 12, ignored=0), labels(2, 12, ignored=0, seed=5).clamp(max=VOCAB - PADDED - 1)
MASK = labels(2, 12, ignored=0.4, seed=6).ge(0).float()


def model(rank: Rank, **options: Any) -> Any:
    """Return a GPTModel of two layers whose ranks share weights and vocabulary."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from megatron.core.transformer import TransformerConfig

    if rank.device.type == "cpu":  # Megatron asks for the current GPU and its random numbers
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
        get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(rank.world_size)
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, use_cpu_initialization=True, attention_dropout=0.0,
        hidden_dropout=0.0, tensor_model_parallel_size=rank.world_size, **options,
    )  # fmt: skip
    layer = get_gpt_layer_local_spec()
    mtp = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False) if "mtp_num_layers" in options else None
    return GPTModel(config, layer, VOCAB, 16, parallel_output=True, mtp_block_spec=mtp).to(rank.device)


def losses(net: Any, **options: Any) -> Tensor:
    positions = torch.arange(12).expand(2, 12)
    hidden = torch.triu(torch.ones(12, 12), 1).bool()[None, None]
    return net(TOKENS, positions, hidden, labels=LABELS, loss_mask=MASK, **options)


def masked(values: Tensor) -> Tensor:
    return (values * MASK).sum() / MASK.sum()


def both_functions(rank: Rank, dtype: torch.dtype, fused: bool) -> Any:
    """Return loss and gradient of this rank's logits by Megatron's function and by ours."""
    net = model(rank, cross_entropy_loss_fusion=fused, cross_entropy_fusion_impl="native")
    columns = VOCAB // rank.world_size
    shard = normal(12, 2, VOCAB, dtype=dtype)[..., rank.rank * columns :][..., :columns]

    def loss(logits: Tensor) -> Tensor:
        return masked(net.compute_language_model_loss(LABELS, logits * 1))

    answers = [gradients(loss, shard)]
    for options in ({}, {"in_place": True}, {"vocab_size": VOCAB - PADDED}):
        with integration.patched(**options):
            answers.append(gradients(loss, shard))
    return answers


@pytest.mark.parametrize("ranks", [1, 2])
def test_values_and_gradients_are_those_of_its_loss(ranks: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for fused in (False, True):
            answers = run_on_ranks(ranks, both_functions, dtype, fused)
            for theirs, ours, in_place, padded in answers:
                rounded = torch.bfloat16 if fused else dtype  # Megatron's fused loss has gradients in bf16
                assert_close(ours, theirs, rounded)
                assert_close(in_place, theirs, rounded)
                logits = normal(12, 2, VOCAB, dtype=dtype)[..., : VOCAB - PADDED].float().movedim(2, 1)
                truth = torch.nn.functional.cross_entropy(logits, LABELS.t(), reduction="none").t()
                assert_close(padded[0], masked(truth), dtype)
    assert answers[-1][3][1][0][..., -PADDED:].abs().max() == 0


def trained(rank: Rank, ours: bool, **options: Any) -> tuple[list[float], list[Tensor]]:
    """Return the losses of ten steps, and the last gradients."""
    net = model(rank, mtp_num_layers=1)
    with integration.patched() if ours else contextlib.nullcontext():
        history = ten_steps(net.parameters(), lambda: masked(losses(net, **options)))
    return history, [each.grad for each in net.parameters()]


def both_trainings(rank: Rank, processor: Any) -> Any:
    return trained(rank, False), trained(rank, True, **({"output_processor": processor} if processor else {}))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("processor", [None, integration.output_processor], ids=["logits", "no_logits"])
def test_ten_steps_of_its_model_have_its_losses(ranks: int, processor: Any) -> None:
    from megatron.core import __version__

    if processor and __version__ < "0.19":
        pytest.skip("an output processor needs Megatron-core 0.19")
    for theirs, ours in run_on_ranks(ranks, both_trainings, processor):
        assert theirs[0][-1] < theirs[0][0] - 0.1
        assert_close(ours[0], theirs[0])
        for one, other in zip(ours[1], theirs[1], strict=True):
            assert (one - other).abs().max() < 1e-4  # ten steps of Adam increase the rounding


def along_the_sequence(rank: Rank) -> Any:
    """Return loss and gradients of hidden states of which each rank has a part of the sequence, and those of all."""
    hidden, weight = normal(12, 2, 32), normal(VOCAB, 32, seed=3)
    cross_entropy = torch.nn.functional.cross_entropy
    truth = gradients(
        lambda h, w: masked(cross_entropy((h @ w.T).movedim(2, 1), LABELS.t(), reduction="none").t()), hidden, weight
    )
    columns, part = VOCAB // rank.world_size, 12 // rank.world_size
    rows, shard = hidden[rank.rank * part :][:part], weight[rank.rank * columns :][:columns]
    config = SimpleNamespace(use_mup=False, sequence_parallel=True)

    def loss(own_hidden: Tensor, own_weight: Tensor) -> Tensor:
        layer = SimpleNamespace(weight=own_weight, tp_group=rank.group)
        values = integration.output_processor(
            hidden_states=own_hidden, output_layer=layer, output_weight=None, labels=LABELS, config=config
        )
        return masked(values)

    return truth, gradients(loss, rows, shard)


def test_an_output_processor_takes_parts_of_the_sequence() -> None:
    answers = run_on_ranks(2, along_the_sequence)
    loss, grads = answers[0][0]
    for _, ours in answers:
        assert_close(ours[0], loss)
    for index, whole in enumerate(grads):
        assert_close(torch.cat([ours[1][index] for _, ours in answers]), whole)
