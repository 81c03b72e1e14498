"""Count the parameters and floating-point operations of the whole model from a problem's fields alone."""

from __future__ import annotations

from tpbench.workloads.train_step.problem import TrainStep

_FOUR_NORMS = ("gemma2", "gemma3_text")
"""Architectures with a norm before and a norm after each block. Others have one norm for each block."""
_NORMS_OF_HEADS = ("qwen3", "gemma3_text")
"""Architectures that normalise each head of queries and keys."""
_NORMS_OF_ALL_HEADS = ("olmo2", "olmo3")
"""Architectures that normalise queries and keys over all heads together."""


def layer_matmul_parameters(problem: TrainStep) -> int:
    """Return the number of weights in the matrix products of one decoder layer."""
    return attention_parameters(problem) + feed_forward_parameters(problem)


def attention_parameters(problem: TrainStep) -> int:
    """Return the number of weights in the matrix products of one layer's attention."""
    return problem.hidden_size * (2 * problem.heads + 2 * problem.kv_heads) * problem.head_dim


def feed_forward_parameters(problem: TrainStep) -> int:
    """Return the number of weights in the matrix products of one layer's feed-forward block."""
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
    return 6 * products + attention_flops_per_token(problem)


def step_flops(problem: TrainStep) -> int:
    """Return the operations of one replica's model in one step."""
    return flops_per_token(problem) * problem.tokens * problem.accumulate


def attention_flops_per_token(problem: TrainStep) -> int:
    """Return the operations of all layers for one token, forward and backward: queries x keys, and weights x values."""
    full = (problem.depth - problem.window_layers) * problem.seq_length
    return 12 * problem.heads * problem.head_dim * (full + problem.window_layers * (problem.window or 0))
