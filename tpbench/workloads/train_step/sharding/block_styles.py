"""The style of each block of the decoder layers, from a problem's fields alone.

`plan` decides the styles of all modules, from the model itself. A forecast must do without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import cast

from tpbench.workloads.train_step.problem import TrainStep
from tpbench.workloads.train_step.sharding.styles import Style, parse_mapping

GATHERED_ATTENTION = ("olmo2", "olmo3", "phi3", "bitnet")
"""Architectures whose plan gathers the columns of queries, keys and values on every rank."""
GATHERED_FEED_FORWARD = ("phi3", "glm", "glm4", "bitnet")
"""Architectures whose plan gathers the columns of gate and up on every rank."""
_FIRST_OF_ATTENTION = (
    "self_attn.q_proj",
    "self_attn.qkv_proj",
    "self_attn.query_key_value",
    "attention.query_key_value",
)
_FIRST_OF_FEED_FORWARD = (
    "mlp.gate_proj", "mlp.gate_up_proj", "mlp.up_proj", "mlp.fc1", "mlp.c_fc", "mlp.dense_h_to_4h",
)  # fmt: skip
"""Names of a block's first linear layer. In a valid plan, its style follows for the others."""


@dataclass(frozen=True)
class LayerStyles:
    """The styles of the first linear layers in the two blocks of a decoder layer."""

    attention: Style
    feed_forward: Style


def layer_styles(problem: TrainStep) -> list[LayerStyles]:
    """Return the styles of each decoder layer: those of `tp_mapping`, else those of the architecture's plan."""
    attention = _planned(problem, GATHERED_ATTENTION)
    feed_forward = _planned(problem, GATHERED_FEED_FORWARD)
    mapping = parse_mapping(problem.tp_mapping)

    def style(number: int, names: Sequence[str], planned: Style) -> Style:
        of_layer = [f"layers.{number}.{name}" for name in names]
        found = (each for pattern, each in mapping.items() if any(fnmatchcase(name, pattern) for name in of_layer))
        return cast("Style", next(found, planned))

    return [
        LayerStyles(style(number, _FIRST_OF_ATTENTION, attention), style(number, _FIRST_OF_FEED_FORWARD, feed_forward))
        for number in range(problem.depth)
    ]


def _planned(problem: TrainStep, gathered: Sequence[str]) -> Style:
    return "colwise_gather_output" if problem.architecture in gathered else "colwise"
