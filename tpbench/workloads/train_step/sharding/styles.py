"""How tensor-parallel ranks share a model, from a problem's fields alone: styles of modules, and heads of a rank.

`plan` decides the styles of all modules, from the model itself. A forecast must do without torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import gcd
from typing import cast

from tpbench.workloads.train_step.problem import Style, TrainStep, parse_mapping

GATHERED_ATTENTION = ("olmo2", "olmo3", "phi3")
"""Architectures whose plan gathers the columns of queries, keys and values on every rank."""
GATHERED_FEED_FORWARD = ("phi3",)
"""Architectures whose plan gathers the columns of gate and up on every rank."""
_FIRST_OF_ATTENTION = ("self_attn.q_proj", "self_attn.qkv_proj")
_FIRST_OF_FEED_FORWARD = ("mlp.gate_proj", "mlp.gate_up_proj", "mlp.fc1")
"""Names of a block's first linear layer. In a valid plan, its style follows for the others."""
REPEATING = ("fsdp_dtensor", "fsdp_dtensor_async")
"""Variants in which several ranks can compute with the same key-value head."""


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


@dataclass(frozen=True)
class HeadShare:
    """The heads of one rank."""

    key_values: tuple[int, ...]
    """The key-value head of each group of query heads, as an index into all key-value heads, in ascending order. A head
    is there twice if the rank's groups of queries are smaller than those of the model."""
    group: int
    """Number of query heads in a group."""

    @property
    def computed(self) -> range:
        """Key-value heads that the rank computes, each once."""
        return range(self.key_values[0], self.key_values[-1] + 1)


def head_share(problem: TrainStep, tp_size: int, rank: int) -> HeadShare:
    """Return the heads of a rank. `tp_size` must divide the query heads, but not the key-value heads.

    Attention of one rank has groups of equal size. With 6 query heads, 3 key-value heads and 2 ranks, the first rank
    has queries 0 to 2, which use key-value heads 0, 0 and 1: groups of one query, of which two have the same head.
    """
    queries, group = problem.heads // tp_size, problem.heads // problem.kv_heads
    common = gcd(queries, group)
    heads = tuple((rank * queries + query) // group for query in range(0, queries, common))
    return HeadShare(heads, common)


def needs_repeated_heads(problem: TrainStep, tp_size: int) -> bool:
    """Return whether several ranks must compute with the same key-value head where attention is sharded.

    This is so if `tp_size` does not divide the key-value heads. Only the variants of `REPEATING` can do it.
    """
    return problem.kv_heads % tp_size > 0


def layers_with_repeated_heads(problem: TrainStep, variant: str, tp_size: int) -> int:
    """Return the number of layers in which several ranks of the variant compute with the same key-value heads."""
    if variant not in REPEATING or not needs_repeated_heads(problem, tp_size):
        return 0
    return sum(styles.attention == "colwise" for styles in layer_styles(problem))


def key_value_parameters(problem: TrainStep) -> int:
    """Return the number of weights that compute the keys and values of one layer."""
    return 2 * problem.hidden_size * problem.kv_heads * problem.head_dim


def unsupported_sizes(problem: TrainStep, variant: str, tp_size: int) -> str | None:
    """Return why the ranks cannot share the heads and columns of the sharded blocks, or None if they can."""
    return next(_complaints(problem, variant, tp_size), None)


def _complaints(problem: TrainStep, variant: str, tp_size: int) -> Iterator[str]:
    replicated = "a tp_mapping can replicate the block"
    styles = layer_styles(problem)
    attention, feed_forward = {layer.attention for layer in styles}, {layer.feed_forward for layer in styles}
    if "colwise" in attention:
        if problem.heads % tp_size:
            yield f"tp_size={tp_size} must divide heads={problem.heads}: {replicated}"
        if needs_repeated_heads(problem, tp_size) and variant not in REPEATING:
            yield (
                f"it gives each key-value head to one rank: tp_size={tp_size} must divide kv_heads={problem.kv_heads}; "
                "fsdp_dtensor can give a head to several ranks"
            )
    if "colwise_gather_output" in attention:
        for name, heads in (("heads", problem.heads), ("kv_heads", problem.kv_heads)):
            if heads * problem.head_dim % tp_size or (variant == "autotp" and heads % tp_size):
                yield f"tp_size={tp_size} must divide the columns of {name}={heads}: {replicated}"
    if feed_forward != {"replicated"} and problem.ffn_size % tp_size:
        yield f"tp_size={tp_size} must divide ffn_size={problem.ffn_size}: {replicated}"
