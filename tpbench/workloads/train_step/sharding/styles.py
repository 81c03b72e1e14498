"""How tensor-parallel ranks share a model, from a problem's fields alone.

`plan` decides the styles of all modules, from the model itself. A forecast must do without torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import cast

from tpbench.workloads.train_step.problem import Style, TrainStep, parse_mapping

GATHERED_ATTENTION = ("olmo2", "olmo3", "phi3")
"""Architectures whose plan gathers the columns of queries, keys and values on every rank."""
GATHERED_FEED_FORWARD = ("phi3",)
"""Architectures whose plan gathers the columns of gate and up on every rank."""
_FIRST_OF_ATTENTION = ("self_attn.q_proj", "self_attn.qkv_proj")
_FIRST_OF_FEED_FORWARD = ("mlp.gate_proj", "mlp.gate_up_proj", "mlp.fc1")
"""Names of a block's first linear layer. In a valid plan, its style follows for the others."""


@dataclass(frozen=True)
class LayerStyles:
    """The styles of the first linear layers in the two blocks of a decoder layer."""

    attention: Style
    feed_forward: Style


def layer_styles(problem: TrainStep) -> list[LayerStyles]:
    """Return the styles of each decoder layer: those of `tp_mapping`, else those of the architecture's plan."""
    mapping = parse_mapping(problem.tp_mapping)

    def style(number: int, names: Sequence[str], gathering: Sequence[str]) -> Style:
        for pattern, mapped in mapping.items():
            if any(fnmatchcase(f"layers.{number}.{name}", pattern) for name in names):
                return cast("Style", mapped)
        return "colwise_gather_output" if problem.architecture in gathering else "colwise"

    return [
        LayerStyles(
            style(number, _FIRST_OF_ATTENTION, GATHERED_ATTENTION),
            style(number, _FIRST_OF_FEED_FORWARD, GATHERED_FEED_FORWARD),
        )
        for number in range(problem.depth)
    ]


def unsupported_sizes(problem: TrainStep, variant: str, tp_size: int) -> str | None:
    """Return why the ranks cannot share the heads and columns of the sharded blocks, or None if they can."""
    return next(_complaints(problem, variant, tp_size), None)


def _complaints(problem: TrainStep, variant: str, tp_size: int) -> Iterator[str]:
    replicated = "a tp_mapping can replicate the block"
    styles = layer_styles(problem)
    attention, feed_forward = {layer.attention for layer in styles}, {layer.feed_forward for layer in styles}
    if "colwise" in attention:
        for name, heads in (("heads", problem.heads), ("kv_heads", problem.kv_heads)):
            if heads % tp_size:
                yield f"tp_size={tp_size} must divide {name}={heads}: {replicated}"
    if "colwise_gather_output" in attention:
        for name, heads in (("heads", problem.heads), ("kv_heads", problem.kv_heads)):
            if heads * problem.head_dim % tp_size or (variant == "autotp" and heads % tp_size):
                yield f"tp_size={tp_size} must divide the columns of {name}={heads}: {replicated}"
    if feed_forward != {"replicated"} and problem.ffn_size % tp_size:
        yield f"tp_size={tp_size} must divide ffn_size={problem.ffn_size}: {replicated}"
