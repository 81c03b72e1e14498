"""The losses of the train step."""

from __future__ import annotations

import pytest
import torch

from tests.support.train_step import tiny_problem
from tpbench.workloads.train_step.losses import tpbench_linear_loss
from tpbench.workloads.train_step.model_configuration import UnknownArchitecture


def test_the_linear_loss_refuses_a_model_that_changes_its_logits() -> None:
    """A softcap, for example, would change the hidden states in place of the logits."""
    head = torch.nn.Linear(32, 96)
    loss = tpbench_linear_loss(tiny_problem(), head, None, 0)
    hidden, labels = torch.ones(2, 16, 32), torch.zeros(2, 16, dtype=torch.int64)
    assert head(hidden) is hidden
    with pytest.raises(UnknownArchitecture, match="tiny changes logits after its head"):
        loss(head(hidden) * 2, labels)
