"""The integration of TRL: its head's function, and trainings with SFT and GRPO, with the released package."""

from __future__ import annotations

import contextlib
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.peers.compared import VOCAB, assert_close, gradients, labels, normal, tiny_model, tiny_tokenizer, weighted
from tests.support.ranks import Rank, run_on_ranks
from tpbench.integrations import patches
from tpbench.integrations import trl as integration

trl = pytest.importorskip("trl", reason="trl is not installed")
HIDDEN, WEIGHT, BIAS = normal(20, 32), normal(VOCAB, 32, seed=1), normal(VOCAB, seed=2)
TARGETS = labels(20, ignored=0.0)
UNPATCHED = SimpleNamespace(args=SimpleNamespace())


def outputs(hidden: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> tuple[Tensor, ...]:
    """Return what the head's function of the trainers returns now."""
    return importlib.import_module("trl.trainer.utils")._ChunkedLogProbFunction.apply(
        hidden, weight, bias, TARGETS, *options
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options", [(1.0, 64, None, 1.0), (0.7, 64, None, 0.25), (1.0, 64, 5.0, 1.0), (1.0, 64, 5.0, 0.5)], ids=str
)
@pytest.mark.parametrize(
    "names", [("log_probs",), ("log_probs", "entropy", "is_top1"), ("log_probs", "mean_logits")], ids=str
)
def test_the_heads_outputs_and_gradients_are_its_own(dtype: torch.dtype, options: Any, names: Any) -> None:
    tensors = [each.to(dtype) for each in (HIDDEN, WEIGHT, BIAS)]

    def both() -> tuple[Any, ...]:
        return outputs(*tensors, *options, names), gradients(
            lambda *x: weighted(*outputs(*x, *options, names)[:2]), *tensors
        )

    theirs = both()
    with integration.patch(UNPATCHED):
        ours = both()
    assert [each is None for each in ours[0]] == [each is None for each in theirs[0]]
    for one, other in zip(filter(torch.is_tensor, ours[0]), filter(torch.is_tensor, theirs[0]), strict=True):
        assert one.dtype == other.dtype
        assert_close(one, other, dtype)
    assert_close(ours[1], theirs[1], dtype)


def with_shards(rank: Rank) -> Any:
    """Return the head's gradients with a weight that the ranks share, and their whole logits' ones."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh(rank.device.type, (rank.world_size,), mesh_dim_names=("tp",))
    options = (0.7, 64, None, 1.0, ("log_probs", "entropy"))
    theirs = gradients(lambda *x: weighted(*outputs(*x, None, *options)[:2]), HIDDEN, WEIGHT)
    shard = distribute_tensor(WEIGHT, mesh, [Shard(0)])
    with integration.patch(UNPATCHED):
        loss, (hidden, weight) = gradients(lambda *x: weighted(*outputs(*x, None, *options)[:2]), HIDDEN, shard)
    return theirs, (loss, [hidden, weight.full_tensor()]), weight.to_local().shape[0]


def test_two_ranks_share_the_head_without_gathering_it() -> None:
    for theirs, ours, columns in run_on_ranks(2, with_shards):
        assert_close(ours, theirs)
        assert columns == VOCAB // 2


def logged(
    trainer: str, folder: Path, patched: bool, columns: Any, options: Any, **others: Any
) -> dict[str, list[float]]:
    """Return what ten steps of a trainer log, by name."""
    from datasets import Dataset
    from transformers import Qwen3ForCausalLM

    arguments = getattr(trl, f"{trainer}Config")(
        str(folder), use_cpu=not torch.cuda.is_available(), report_to=[], learning_rate=1e-3, logging_steps=1,
        bf16=False, max_steps=10, gradient_accumulation_steps=2, **options,
    )  # fmt: skip
    tiny_model().save_pretrained(folder)  # the reference model is read from there
    run = getattr(trl, f"{trainer}Trainer")(
        Qwen3ForCausalLM.from_pretrained(folder), args=arguments, train_dataset=Dataset.from_dict(columns),
        processing_class=tiny_tokenizer(), **others,
    )  # fmt: skip
    with integration.patch(run) if patched else contextlib.nullcontext():
        run.train()
    steps = [each for each in run.state.log_history if "loss" in each]
    return {name: [step.get(name, 0.0) for step in steps] for name in steps[0] if "time" not in name}


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Record the settings of losses: the gradient of a function is computed in forward."""
    recorded = mock.Mock(wraps=patches.linear_loss_of)
    monkeypatch.setattr(integration, "linear_loss_of", recorded)
    return recorded


def compare(tmp_path: Path, *arguments: Any, **others: Any) -> None:
    theirs, ours = (logged(arguments[0], tmp_path, patched, *arguments[1:], **others) for patched in (False, True))
    assert theirs.keys() == ours.keys()
    assert len(theirs["loss"]) == 10 and len(set(theirs["loss"])) > 5
    for name, values in theirs.items():
        assert ours[name] == pytest.approx(values, rel=1e-4, abs=1e-5, nan_ok=True), name


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_ten_steps_of_sft_log_its_losses_entropies_and_accuracies(
    tmp_path: Path, spy: mock.Mock, loss_type: str
) -> None:
    words = [labels(12, ignored=0, seed=seed % 4).tolist() for seed in range(40)]
    masks = [[0] * (3 + seed % 4) + [1] * (9 - seed % 4) for seed in range(40)]
    options = {"per_device_train_batch_size": 2, "loss_type": loss_type}
    compare(tmp_path, "SFT", {"input_ids": words, "completion_mask": masks}, options)
    assert callable(spy.call_args.kwargs["loss"]) == (loss_type == "nll")


GRPO = {
    "grpo": {"beta": 0.1},
    "bnpo": {"beta": 0.1, "use_bias_correction_kl": False},
    "dr_grpo": {"delta": 1.5},
    "dapo": {"num_iterations": 2},
    "cispo": {"epsilon_high": 5.0},
    "sapo": {},
}


@pytest.mark.parametrize("loss_type", GRPO)
def test_ten_steps_of_grpo_log_its_losses(tmp_path: Path, spy: mock.Mock, loss_type: str) -> None:
    sizes = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 6, "temperature": 0.8}
    prompts = [f"{seed} {seed + 1} {seed + 2}" for seed in range(40)]

    def even(completions: list[str], **_: Any) -> list[float]:
        return [sum(int(word) % 2 == 0 for word in text.split() if word.isdigit()) for text in completions]

    options = {"loss_type": loss_type, **sizes, **GRPO[loss_type]}
    compare(tmp_path, "GRPO", {"prompt": prompts}, options, reward_funcs=even)
    assert callable(spy.call_args.kwargs["loss"]) == (loss_type != "sapo")
