"""The change that a model of the transformers package makes to its logits after the head: a scale, a cap, or none."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from tpbench.workloads.train_step.model.configuration import UnknownArchitecture, refused_by_transformers
from tpbench.workloads.train_step.model.models import build
from tpbench.workloads.train_step.problem import TrainStep

_LARGE = 1e6
"""A logit so large that a cap, if there is one, alone determines its changed value."""


@dataclass(frozen=True)
class LogitsChange:
    """Logits become scale * cap * tanh(logits / cap), or scale * logits without a cap."""

    scale: float
    cap: float | None

    def __call__(self, logits: Tensor) -> Tensor:
        return self.scale * (logits if self.cap is None else self.cap * torch.tanh(logits / self.cap))


@functools.cache
def logits_change(problem: TrainStep) -> LogitsChange:
    """Return the change that the problem's model makes to its logits, from its outputs for known numbers.

    Raises UnknownArchitecture if a scale and a cap do not describe it.
    """
    model = build(replace(problem, num_layers=1, activation_checkpointing=False))
    numbers = torch.cat([torch.linspace(-40.0, 40.0, 17), torch.tensor([1e-3, _LARGE])])
    changed = _changed(model, numbers)
    scale, limit = float(changed[-2] / numbers[-2]), float(changed[-1])
    capped = limit < _LARGE * scale / 2
    change = LogitsChange(scale, limit / scale if capped else None)
    if not (scale > 0 and torch.allclose(change(numbers), changed, rtol=1e-4)):
        raise UnknownArchitecture(
            f"{problem.model} ({problem.architecture}) changes logits after its head by more than a scale and a cap, "
            "which train_loss=tpbench_linear cannot do; train_loss=tpbench can be trained"
        )
    return change


@torch.no_grad()
def _changed(model: Any, logits: Tensor) -> Tensor:
    """Return these logits, (count,), after the model's change. The model's own decoder and head compute nothing."""
    output = BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=logits[None, None])
    setattr(model, model.base_model_prefix, _Returns(output))
    model.lm_head = nn.Identity()
    with refused_by_transformers(f"{model.config.model_type} cannot be tried with given logits"):
        result: Tensor = model(input_ids=torch.zeros(1, 1, dtype=torch.int64)).logits
    return result[0, 0]


class _Returns(nn.Module):
    """A module that returns one value for every input."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.value
