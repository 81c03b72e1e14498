"""The losses of the train step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.train_step import tiny_problem
from tpbench.workloads.train_step.model.logits_change import LogitsChange, logits_change
from tpbench.workloads.train_step.sharding import check
from tpbench.workloads.train_step.sharding.check import unsupported_loss


@pytest.mark.parametrize(
    ("fields", "change"),
    [
        ({}, LogitsChange(1.0, None)),
        ({"architecture": "cohere"}, LogitsChange(0.0625, None)),
        ({"architecture": "gemma2", "attention": "eager"}, LogitsChange(1.0, 30.0)),
    ],
)
def test_what_a_model_does_to_its_logits(fields: dict[str, Any], change: LogitsChange) -> None:
    assert logits_change(tiny_problem(**fields)) == change


def test_the_scale_of_logits_may_be_in_a_folder(tmp_path: Path) -> None:
    content = {
        "model_type": "granite", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96, "logits_scaling": 5.0,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(content))
    change = logits_change(tiny_problem(architecture="granite", model_dir=str(tmp_path)))
    assert change.scale == pytest.approx(0.2) and change.cap is None


def test_the_plan_refuses_the_linear_loss_for_other_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = tiny_problem(architecture="granite", train_loss="tpbench_linear", seed=7)
    assert unsupported_loss(problem) is None
    from tpbench.workloads.train_step.model import logits_change as module

    monkeypatch.setattr(module, "_changed", lambda model, logits: torch.sinh(logits / 40.0))
    module.logits_change.cache_clear()
    reason = check.unsupported_loss(problem)
    module.logits_change.cache_clear()
    assert reason is not None and "changes logits after its head by more than a scale and a cap" in reason
