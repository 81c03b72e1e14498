"""The linear loss is refused for models whose change of the logits it does not know."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.composed_jobs import job
from tpbench.workloads.train_step import WORKLOAD


@pytest.mark.parametrize(("architecture", "known"), [("qwen2", True), ("gemma2", True), ("cohere", False)])
def test_the_linear_loss_is_for_models_that_leave_or_cap_their_logits(architecture: str, known: bool) -> None:
    fields: Any = {"architecture": architecture, "train_loss": "tpbench_linear", "attention": "eager"}
    cell = job("variant=fsdp", "shape=tiny_train_dp2", *(f"{name}={value}" for name, value in fields.items()))
    reason = WORKLOAD.unsupported_reason(cell)
    assert (reason is None) == known and (known or "does not know what cohere does to the head's logits" in str(reason))
