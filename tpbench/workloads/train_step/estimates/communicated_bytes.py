"""Count the bytes that a rank sends in one step, from a problem's fields and its model's plan."""

from __future__ import annotations

from tpbench.workloads.train_step.estimates.plan_bytes import bytes_beside_pairs
from tpbench.workloads.train_step.estimates.rank_sizes import parameters_per_rank
from tpbench.workloads.train_step.model.sizes import vocab_parameters
from tpbench.workloads.train_step.problem import ITEM_BYTES, TrainStep
from tpbench.workloads.train_step.sharding.key_value_heads import key_value_parameters, layers_with_repeated_heads


def bytes_communicated(problem: TrainStep, variant: str, tp_size: int, dp_size: int) -> int:
    """Return the bytes that a rank sends in a step: all collectives on activations, logits and parameters, as rings.

    Under autocast the residual stream has the parameters' dtype, and outputs of products have the computation's dtype.
    """
    per_token = _autotp_bytes(problem) if variant == "autotp" else _sequence_parallel_bytes(problem, variant)
    if tp_size > 1:
        per_token += bytes_beside_pairs(problem, variant)
    tensor_parallel = (
        problem.accumulate * _exchanged_tokens(problem, variant, tp_size) * per_token * (tp_size - 1) // tp_size
    )
    # Ranks sum the gradients of repeated heads in fp32, after replicas have sharded them.
    repeated = layers_with_repeated_heads(problem, variant, tp_size) * key_value_parameters(problem)
    tensor_parallel += 2 * ITEM_BYTES["float32"] * repeated // dp_size * (tp_size - 1) // tp_size
    return tensor_parallel + _data_parallel_bytes(problem, variant, tp_size) * (dp_size - 1) // dp_size


def _exchanged_tokens(problem: TrainStep, variant: str, tp_size: int) -> int:
    """Return the tokens of a micro-batch, with the padding that makes the shares of the ranks equal."""
    if variant == "autotp":
        return problem.tokens
    if variant == "dtensor_tp":
        return problem.batch_size * -(-problem.seq_length // tp_size) * tp_size
    return -(-problem.tokens // tp_size) * tp_size


def _autotp_bytes(problem: TrainStep) -> int:
    """Return the bytes of all collectives on one token's activations. An all-reduce counts twice: it is a
    reduce-scatter and an all-gather."""
    stored, compute = ITEM_BYTES[problem.stored_dtype], ITEM_BYTES[problem.dtype]
    embedding = problem.vocab_parallel  # otherwise each rank has all rows of the embedding
    head = problem.vocab_parallel or not problem.tied
    # Forward, in the computation's dtype: one all-reduce after o and one after down. Checkpointing repeats the first;
    # the second is not needed again.
    in_compute = problem.depth * (3 if problem.activation_checkpointing else 2)
    # Backward, in the parameters' dtype: one for each of q, k, v, gate and up. So is that of the embedding.
    in_stored = 5 * problem.depth + embedding
    of_head = head * (compute if problem.train_loss == "tpbench_linear" else stored)
    hidden = 2 * problem.hidden_size * (in_compute * compute + in_stored * stored + of_head)
    gathered_logits = not problem.vocab_parallel and not problem.tied
    return hidden + (problem.vocab * compute if gathered_logits else 0)


def _sequence_parallel_bytes(problem: TrainStep, variant: str) -> int:
    """Return the bytes of all collectives on one token's activations. There is an all-gather before attention and
    before feed-forward, and a reduce-scatter after each; embedding and head have one collective each."""
    stored, compute = ITEM_BYTES[problem.stored_dtype], ITEM_BYTES[problem.dtype]
    # In the parameters' dtype: all-gathers of normed tensors, reduce-scatters of their gradients, and the embedding's.
    # In the computation's dtype: reduce-scatters of products, and all-gathers of their gradients.
    in_stored, in_compute = 4 * problem.depth + 4, 4 * problem.depth
    if problem.activation_checkpointing:  # repeats both all-gathers of a layer and the first reduce-scatter
        in_stored, in_compute = in_stored + 2 * problem.depth, in_compute + problem.depth
    if problem.train_loss == "tpbench_linear":
        # The loss gathers the tokens, and scatters their gradient, after the cast. In dtensor_tp the head gathers the
        # tokens before the cast, and the loss all-reduces their gradient.
        in_stored, in_compute = in_stored - (1 if variant == "dtensor_tp" else 2), in_compute + 2
    hidden = problem.hidden_size * (in_stored * stored + in_compute * compute)
    return hidden + (0 if problem.vocab_parallel else problem.vocab * compute)


def _data_parallel_bytes(problem: TrainStep, variant: str, tp_size: int) -> int:
    """Return the bytes that replicas all-gather or reduce-scatter in a step. An all-reduce counts twice."""
    stored = ITEM_BYTES[problem.stored_dtype]
    held = parameters_per_rank(problem, variant, tp_size)
    if variant == "ddp" or (variant == "autotp" and not problem.zero_stage):
        return 2 * held * stored
    if variant == "autotp":
        # ZeRO all-reduces gradients, stage 2 after every micro-batch, and all-gathers parameters. A product's gradient
        # has the computation's dtype.
        looked_up = 0 if problem.tied else vocab_parameters(problem) // (tp_size if problem.vocab_parallel else 1)
        gradients = looked_up * stored + (held - looked_up) * ITEM_BYTES[problem.dtype]
        return 2 * gradients * (problem.accumulate if problem.zero_stage == 2 else 1) + held * stored
    # FSDP gathers parameters for each forward and each backward pass. It keeps those that the forward pass uses last,
    # because the backward pass uses them first.
    kept = problem.hidden_size + vocab_parameters(problem) // tp_size
    return ((2 * problem.accumulate + 1) * held - problem.accumulate * kept) * stored
