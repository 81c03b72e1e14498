"""The integration of Transformers: its loss, its tensor parallelism and its Trainer, with the released package."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.peers.compared import VOCAB, assert_close, gradients, labels, normal, tiny_model, whole
from tests.support.ranks import Rank, run_on_ranks
from tpbench.integrations import patches
from tpbench.integrations import transformers as integration

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate, which the Trainer needs, is not installed")

TOKENS = labels(2, 12, ignored=0.0)
LABELS = labels(2, 12)


def current_loss() -> Any:
    return importlib.import_module("transformers.loss.loss_utils").LOSS_MAPPING["ForCausalLM"]


OPTIONS = [{}, {"num_items_in_batch": torch.tensor(37)}, {"num_items_in_batch": 37}, {"ignore_index": 3}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [*OPTIONS, {"shift_labels": labels(2, 12, seed=4)}], ids=", ".join)
def test_values_and_gradients_are_those_of_its_loss(dtype: torch.dtype, options: dict[str, Any]) -> None:
    logits = normal(2, 12, VOCAB, dtype=dtype)
    given = LABELS.clamp(min=0) if "ignore_index" in options else LABELS
    theirs = gradients(lambda x: current_loss()(x, given, VOCAB, **options), logits)
    for in_place in (False, True):
        with integration.patched(in_place=in_place):
            ours = gradients(lambda x: current_loss()(x * 1, given, VOCAB, **options), logits)
        assert_close(ours, theirs, dtype)


def test_the_patch_is_taken_out_and_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    before = current_loss()
    patch = integration.patched()
    assert current_loss() is not before
    patch.undo()
    assert current_loss() is before
    monkeypatch.setattr(patches.importlib.metadata, "version", lambda package: "4.57.1")
    with pytest.raises(ImportError, match=r"transformers 4.57.1 is installed, and tpbench was tried with 5"):
        integration.patched()


def sharded(rank: Rank, folder: str) -> tuple[Any, ...]:
    """Return loss and gradients of a model whose head stays sharded, and the columns of its logits."""
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(tp_size=rank.world_size, tp_plan={"lm_head": "colwise"})
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
    with integration.patched(tp_group=rank.group):
        output = model(input_ids=TOKENS, labels=LABELS, num_items_in_batch=torch.tensor(30))
        output.loss.backward()
    grads = {name: each.grad for name, each in model.named_parameters()}
    return output.loss.detach(), {name: whole(each) for name, each in grads.items()}, output.logits.shape[-1]


def test_a_head_that_two_ranks_share_stays_sharded(tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path)
    output = model(input_ids=TOKENS, labels=LABELS, num_items_in_batch=torch.tensor(30))
    output.loss.backward()
    for loss, grads, columns in run_on_ranks(2, sharded, str(tmp_path)):
        assert columns == VOCAB // 2
        assert_close(loss, output.loss.detach())
        for name, each in model.named_parameters():
            assert_close(grads[name], each.grad, what=name)


def trained(folder: Path) -> list[float]:
    """Return the losses of ten steps of its Trainer, of two batches each."""
    words, kept = (
        [labels(12, ignored=0, seed=seed) for seed in range(4)],
        [torch.arange(12) > seed for seed in range(4)],
    )
    rows = [{"input_ids": words[row % 4], "labels": words[row % 4].where(kept[row % 4], -100)} for row in range(40)]
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 1, "max_steps": 10}
    arguments = transformers.TrainingArguments(
        str(folder), use_cpu=not torch.cuda.is_available(), report_to=[], learning_rate=1e-2, **options
    )
    trainer = transformers.Trainer(tiny_model(), arguments, train_dataset=rows)
    trainer.train()
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


def test_ten_steps_of_its_trainer_have_its_losses(tmp_path: Path) -> None:
    theirs = trained(tmp_path)
    assert len(theirs) == 10 and theirs[-1] < theirs[0]
    with integration.patched():
        assert_close(trained(tmp_path), theirs)
