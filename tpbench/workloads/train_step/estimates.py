"""Count the parameters and operations of a model, and estimate the memory and communicated bytes of a rank.

A problem's fields are enough: nothing runs, and no model is made.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from tpbench.workloads import Variant
from tpbench.workloads.sizes import ITEM_BYTES
from tpbench.workloads.train_step.problem import TrainStep

ZERO_BUFFER_ELEMENTS = 500_000_000
"""Elements of each of the two buffers in which DeepSpeed's ZeRO reduces gradients (DeepSpeed's default)."""
LINEAR_CHUNK_BYTES = 2**29
"""Memory for the logits of a chunk of the linear loss: `AUTO_GIB` of the kernels, whose module needs torch."""


@dataclass(frozen=True)
class Distribution:
    """How a variant distributes a model. The defaults are those of a variant from outside, which are assumed."""

    replicas: Literal["fsdp", "zero", "ddp"] = "fsdp"
    """FSDP and ZeRO (by `zero_stage`) shard parameters, gradients and optimizer states over replicas. DDP doesn't."""
    sequence_parallel: bool = True
    """True if tensor-parallel ranks share the tokens between the products. Otherwise they all-reduce activations, and
    with vocab_parallel=false each rank has the whole embedding."""
    dtensor_logits: bool = False
    """True if torch's loss gets sharded logits as a DTensor, of which it makes one more copy."""


@dataclass(frozen=True)
class TrainVariant(Variant):
    """A variant of the train step."""

    distribution: Distribution = Distribution()


def layer_matmul_parameters(problem: TrainStep) -> int:
    """Return the number of weights in the matrix products of one decoder layer."""
    attention = (2 * problem.heads + 2 * problem.kv_heads) * problem.head_dim
    return problem.hidden_size * (attention + 3 * problem.ffn_size)


def vocab_parameters(problem: TrainStep) -> int:
    """Return the number of weights of the embedding, which is also that of the head."""
    return problem.vocab * problem.hidden_size


def matrix_parameters(problem: TrainStep) -> int:
    """Return the number of weights of the trained model without norms and biases."""
    return vocab_parameters(problem) * (1 if problem.tied else 2) + problem.depth * layer_matmul_parameters(problem)


def parameters(problem: TrainStep) -> int:
    """Return the number of weights of the trained model without biases and embeddings of positions. Each layer has two
    norms and, in Qwen3, norms of a head's queries and keys."""
    norms = 2 * problem.hidden_size + (2 * problem.head_dim if problem.architecture.startswith("qwen3") else 0)
    return matrix_parameters(problem) + problem.depth * norms + problem.hidden_size


def flops_per_token(problem: TrainStep) -> int:
    """Return the operations of forward and backward pass for one token: 6 N + 12 L H D S, torchtitan's count.

    N counts the weights of all matrix products: the head is included, the embedding's lookup is not. The second term
    is attention's two products over the whole sequence (L layers, H heads of width D, S tokens). There is no discount
    for causality, and operations that checkpointing or several ranks repeat are not counted.
    """
    products = problem.depth * layer_matmul_parameters(problem) + vocab_parameters(problem)
    return 6 * products + 12 * problem.depth * problem.heads * problem.head_dim * problem.seq_length


def step_flops(problem: TrainStep) -> int:
    """Return the operations of one replica's model in one step."""
    return flops_per_token(problem) * problem.tokens * problem.accumulate


class MemoryEstimate(NamedTuple):
    """Bytes that a rank is expected to need, and their peak: activations may be freed as gradients are made."""

    model: int
    gradients: int
    optimizer: int
    activations: int
    total: int


def estimate_memory(
    problem: TrainStep, distribution: Distribution, tp_size: int, dp_size: int, *, on_gpus: bool = True
) -> MemoryEstimate:
    """Estimate the peak memory of a rank as the backward pass begins.

    For ZeRO, the peak may come later: with the first gradient, or in the update. The estimate leaves out
    fragmentation and other buffers of collectives. It follows how the variant shards parameters, and which tensors a
    layer keeps for its backward pass. For Qwen3 of 0.6B to 32B on H200s, measured peaks were 0.89 to 1.12 times the
    estimate. On a CPU (`on_gpus=False`), ZeRO's buffers are not counted: memory that nothing writes to is not taken.
    """
    stored = ITEM_BYTES[problem.stored_dtype]
    held = parameters_per_rank(problem, distribution, tp_size)
    states = 2 * held * stored
    model, gradients = held * stored, held * stored
    buffers = 0
    if distribution.replicas == "zero" and problem.zero_stage:
        buffers = 2 * ZERO_BUFFER_ELEMENTS * ITEM_BYTES[problem.dtype] if on_gpus else 0
        states = -(-3 * held * stored // dp_size)  # two moments and a flat copy of the parameters
        updated = -(-held * stored // dp_size)
        # Gradients exist twice: flat, for the update, and as the backward pass made them.
        gradients = updated + (updated if problem.zero_stage == 2 else gradients)
    elif distribution.replicas == "fsdp":
        model, gradients, states = (-(-size // dp_size) for size in (model, gradients, states))
    # ZeRO allocates the buffers with the first gradient, after the logits are freed, and keeps them until the update.
    logits = _logits_bytes(problem, distribution, tp_size)
    logits_and_buffers = logits + buffers if problem.accumulate > 1 else max(logits, buffers)
    autocast_copies = held * ITEM_BYTES[problem.dtype] if problem.autocast else 0
    activations = _layers_bytes(problem, distribution, tp_size) + logits_and_buffers + autocast_copies
    # Gradients exist while all activations are held, as DDP's, which are views of its buckets, or appear as these go.
    persist = distribution.replicas == "ddp" or problem.accumulate > 1
    passing = gradients + activations if persist else max(gradients, activations)
    return MemoryEstimate(model, gradients, states, activations, model + states + passing)


def _layers_bytes(problem: TrainStep, distribution: Distribution, tp_size: int) -> int:
    stored, compute = ITEM_BYTES[problem.stored_dtype], ITEM_BYTES[problem.dtype]
    # Sequence parallelism also shards the tensors between the matrix products.
    hidden = problem.hidden_size / (tp_size if distribution.sequence_parallel else 1)
    # Kept: the inputs of two norms, and their outputs as inputs of products; queries, keys and values, with the rotated
    # copies of queries and keys; attention's output; gate, up, the activated gate and their product.
    norms = 2 * (stored * hidden + compute * problem.hidden_size)
    rotated = 2 if problem.architecture.startswith("qwen3") else 1  # Qwen3 also keeps them before their norms
    heads = (3 + rotated) * problem.heads + (2 + rotated) * problem.kv_heads
    attention: float = compute * heads * problem.head_dim
    if problem.attention == "eager":
        attention += 2 * problem.heads * problem.seq_length * compute
    feed_forward = compute * 4 * problem.ffn_size
    layer = norms + (attention + feed_forward) / tp_size
    layers = problem.depth * hidden * stored + layer if problem.activation_checkpointing else problem.depth * layer
    return round(problem.tokens * layers)


def _logits_bytes(problem: TrainStep, distribution: Distribution, tp_size: int) -> int:
    columns, item = problem.vocab / (tp_size if problem.vocab_parallel else 1), ITEM_BYTES[problem.dtype]
    if problem.train_loss == "tpbench_linear" or (problem.train_loss == "liger" and tp_size == 1):
        # The logits of a chunk of tokens, and the gradients of hidden states and weight from the forward pass on.
        tokens = problem.tokens / (tp_size if distribution.sequence_parallel else 1)
        chunk = min(problem.tokens * columns * item, LINEAR_CHUNK_BYTES)
        return round(chunk + (columns + tokens) * problem.hidden_size * item)
    per_token = columns * 2 * item  # logits and their gradient
    if problem.train_loss == "torch":  # in fp32: log-probabilities and their gradient; with DTensor, one copy more
        per_token += columns * (12 if problem.vocab_parallel and distribution.dtensor_logits else 8)
    return round(problem.tokens * per_token)


def parameters_per_rank(problem: TrainStep, distribution: Distribution, tp_size: int) -> int:
    """Return the number of weights on one rank before replicas shard them."""
    whole = 0 if distribution.sequence_parallel or problem.vocab_parallel else vocab_parameters(problem)
    return whole + -(-(parameters(problem) - whole) // tp_size)


def bytes_communicated(problem: TrainStep, distribution: Distribution, tp_size: int, dp_size: int) -> int:
    """Return the bytes that a rank sends in a step: all collectives on activations, logits and parameters, as rings."""
    per_token = _bytes_per_token(problem, distribution)
    sent = problem.accumulate * problem.tokens * per_token * (tp_size - 1) // tp_size
    return sent + _data_parallel_bytes(problem, distribution, tp_size) * (dp_size - 1) // dp_size


def _bytes_per_token(problem: TrainStep, distribution: Distribution) -> int:
    """Return the bytes of all collectives on one token's activations. An all-reduce counts twice.

    Under autocast the residual stream has the parameters' dtype, and outputs of products have the computation's dtype.
    """
    stored, compute = ITEM_BYTES[problem.stored_dtype], ITEM_BYTES[problem.dtype]
    repeated = problem.activation_checkpointing
    if distribution.sequence_parallel:
        # Two all-gathers of normed tensors, which checkpointing repeats, and the reduce-scatters of their gradients.
        # The reduce-scatters of both blocks' last products, of which checkpointing repeats the first, and the
        # all-gathers of their gradients. Embedding and head have one collective each, forward and backward.
        layer = (4 + 2 * repeated) * stored + (4 + repeated) * compute
        outside = 4 * stored
    else:
        # Forward, an all-reduce after o, which checkpointing repeats, and one after down. Backward, one for each
        # product behind the input, of queries, keys and values, and of gate and up.
        layer = 2 * ((2 + repeated) * compute + 5 * stored)
        # The embedding has one all-reduce forward, unless each rank has all of its rows; the head has one backward.
        outside = 2 * (problem.vocab_parallel * stored + (problem.vocab_parallel or not problem.tied) * stored)
    gathers_logits = not problem.vocab_parallel and (distribution.sequence_parallel or not problem.tied)
    return problem.hidden_size * (problem.depth * layer + outside) + gathers_logits * problem.vocab * compute


def _data_parallel_bytes(problem: TrainStep, distribution: Distribution, tp_size: int) -> int:
    """Return the bytes that replicas all-gather or reduce-scatter in a step. An all-reduce counts twice."""
    stored = ITEM_BYTES[problem.stored_dtype]
    held = parameters_per_rank(problem, distribution, tp_size)
    if distribution.replicas == "ddp" or (distribution.replicas == "zero" and not problem.zero_stage):
        return 2 * held * stored
    if distribution.replicas == "zero":
        # ZeRO all-reduces gradients, stage 2 after every micro-batch, and all-gathers parameters. A product's gradient
        # has the computation's dtype.
        looked_up = 0 if problem.tied else vocab_parameters(problem) // (tp_size if problem.vocab_parallel else 1)
        gradients = looked_up * stored + (held - looked_up) * ITEM_BYTES[problem.dtype]
        return 2 * gradients * (problem.accumulate if problem.zero_stage == 2 else 1) + held * stored
    # FSDP gathers parameters for each forward and each backward pass. It keeps those that the forward pass uses last,
    # because the backward pass uses them first.
    kept = problem.hidden_size + vocab_parameters(problem) // tp_size
    return ((2 * problem.accumulate + 1) * held - problem.accumulate * kept) * stored
