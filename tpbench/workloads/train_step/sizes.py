"""Count parameters and floating-point operations from a problem's fields alone."""

from __future__ import annotations

from tpbench.workloads.train_step.block_styles import LayerStyles, layer_styles
from tpbench.workloads.train_step.key_value_heads import (
    computed_heads,
    key_value_parameters,
    layers_with_repeated_heads,
)
from tpbench.workloads.train_step.problem import TrainStep

_FOUR_NORMS = ("gemma2", "gemma3_text", "glm4")
"""Architectures with a norm before and a norm after each block. Others have one norm for each block."""
_NORMS_OF_HEADS = ("qwen3", "gemma3_text", "exaone4", "apertus", "hunyuan_v1_dense")
"""Architectures that normalise each head of queries and keys."""
_NORMS_OF_ALL_HEADS = ("olmo2", "olmo3")
"""Architectures that normalise queries and keys over all heads together."""


def layer_matmul_parameters(problem: TrainStep) -> int:
    """Return the number of weights in the matrix products of one decoder layer."""
    return _attention_parameters(problem) + _feed_forward_parameters(problem)


def _attention_parameters(problem: TrainStep) -> int:
    return problem.hidden_size * (2 * problem.heads + 2 * problem.kv_heads) * problem.head_dim


def _feed_forward_parameters(problem: TrainStep) -> int:
    return problem.ffn_matrices * problem.hidden_size * problem.ffn_size


def vocab_parameters(problem: TrainStep) -> int:
    """Return the number of weights of the embedding, which is also that of the head."""
    return problem.vocab * problem.hidden_size


def matrix_parameters(problem: TrainStep) -> int:
    """Return the number of weights of the trained model without norms and biases."""
    return vocab_parameters(problem) * (1 if problem.tied else 2) + problem.depth * layer_matmul_parameters(problem)


def parameters(problem: TrainStep) -> int:
    """Return the number of weights of the trained model without biases and embeddings of positions."""
    return matrix_parameters(problem) + problem.depth * _layer_norm_parameters(problem) + problem.hidden_size


def _layer_norm_parameters(problem: TrainStep) -> int:
    """Return the number of weights in the norms of one decoder layer."""
    of_tokens = (4 if problem.architecture in _FOUR_NORMS else 2) * problem.hidden_size
    if problem.architecture in _NORMS_OF_HEADS:
        return of_tokens + 2 * problem.head_dim
    if problem.architecture in _NORMS_OF_ALL_HEADS:
        return of_tokens + (problem.heads + problem.kv_heads) * problem.head_dim
    return of_tokens


def flops_per_token(problem: TrainStep) -> int:
    """Return the operations of forward and backward pass for one token: 6 N + 12 L H D S, torchtitan's count.

    N counts the weights of all matrix products: the head is included, the embedding's lookup is not. The second term
    is attention's two products over the whole sequence, or over the window if that is shorter (L layers, H heads of
    width D, S tokens). There is no discount for causality, and operations that checkpointing repeats are not counted.
    """
    products = problem.depth * layer_matmul_parameters(problem) + vocab_parameters(problem)
    return 6 * products + _attention_flops_per_token(problem)


def step_flops(problem: TrainStep) -> int:
    """Return the operations of one replica's model in one step."""
    return flops_per_token(problem) * problem.tokens * problem.accumulate


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
        repeated += _attention_flops_per_token(problem) // problem.depth * (styles.attention != "colwise")
        repeated += 6 * _replicated_parameters(problem, styles)
    shared = flops_per_token(problem) - repeated
    if layers := layers_with_repeated_heads(problem, variant, tp_size):
        # Instead of a share of the keys and values, a rank computes all heads that its queries use.
        more = tp_size * computed_heads(problem, tp_size) - problem.kv_heads
        shared += 6 * layers * key_value_parameters(problem) // problem.kv_heads * more
    return (shared + tp_size * repeated) * problem.tokens * problem.accumulate // tp_size


def _attention_flops_per_token(problem: TrainStep) -> int:
    """Return the operations of all layers for one token, forward and backward: queries x keys, and weights x values."""
    full = (problem.depth - problem.window_layers) * problem.seq_length
    return 12 * problem.heads * problem.head_dim * (full + problem.window_layers * (problem.window or 0))


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
    attention = _attention_parameters(problem) * (styles.attention == "replicated")
    return attention + _feed_forward_parameters(problem) * (styles.feed_forward == "replicated")
