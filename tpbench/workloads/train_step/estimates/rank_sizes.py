"""Count the parameters and floating-point operations of one rank from a problem's fields alone."""

from __future__ import annotations

from tpbench.workloads.train_step.model.sizes import (
    attention_flops_per_token,
    attention_parameters,
    feed_forward_parameters,
    flops_per_token,
    parameters,
    vocab_parameters,
)
from tpbench.workloads.train_step.problem import TrainStep
from tpbench.workloads.train_step.sharding.block_styles import LayerStyles, layer_styles
from tpbench.workloads.train_step.sharding.key_value_heads import (
    computed_heads,
    key_value_parameters,
    layers_with_repeated_heads,
)


def rank_flops(problem: TrainStep, variant: str, tp_size: int) -> int:
    """Return the operations of one rank in one step.

    The ranks of a replica share the operations, except those that each of them repeats:

    - blocks that `tp_mapping` replicates,
    - attention, if the columns of queries, keys and values are gathered,
    - keys and values of repeated heads,
    - AutoTP's head, if it has the weight of a whole embedding.
    """
    whole_head = variant == "autotp" and problem.tied and not problem.vocab_parallel
    repeated = 6 * vocab_parameters(problem) * whole_head
    for styles in layer_styles(problem):
        repeated += attention_flops_per_token(problem) // problem.depth * (styles.attention != "colwise")
        repeated += 6 * _replicated_parameters(problem, styles)
    shared = flops_per_token(problem) - repeated
    if layers := layers_with_repeated_heads(problem, variant, tp_size):
        # Instead of a share of the keys and values, a rank computes all heads that its queries use.
        more = tp_size * computed_heads(problem, tp_size) - problem.kv_heads
        shared += 6 * layers * key_value_parameters(problem) // problem.kv_heads * more
    return (shared + tp_size * repeated) * problem.tokens * problem.accumulate // tp_size


def parameters_per_rank(problem: TrainStep, variant: str, tp_size: int) -> int:
    """Return the number of weights on one rank before replicas shard them.

    Blocks that `tp_mapping` replicates are whole, so are the layers of repeated key-value heads and, with
    vocab_parallel=false, AutoTP's embedding.
    """
    whole = layers_with_repeated_heads(problem, variant, tp_size) * key_value_parameters(problem)
    whole += vocab_parameters(problem) if variant == "autotp" and not problem.vocab_parallel else 0
    for styles in layer_styles(problem):
        whole += _replicated_parameters(problem, styles)
    return whole + -(-(parameters(problem) - whole) // tp_size)


def _replicated_parameters(problem: TrainStep, styles: LayerStyles) -> int:
    """Return the number of weights in the replicated blocks of a layer with these styles."""
    attention = attention_parameters(problem) * (styles.attention == "replicated")
    return attention + feed_forward_parameters(problem) * (styles.feed_forward == "replicated")
