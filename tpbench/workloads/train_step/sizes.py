"""Counts from a problem's fields alone: parameters, floating-point operations, memory, bytes on the wire."""

from __future__ import annotations

from dataclasses import dataclass

from tpbench.workloads.train_step.problem import ITEM_BYTES, TrainStep

BUFFER = 500_000_000
"""Elements of each of the two buffers in which DeepSpeed's ZeRO reduces gradients, its default."""


def layer_matmul_parameters(problem: TrainStep) -> int:
    """Weights of one decoder layer's matrix products."""
    attention = 2 * problem.heads + 2 * problem.kv_heads
    return problem.hidden_size * (attention * problem.head_dim + 3 * problem.ffn_size)


def vocab_parameters(problem: TrainStep) -> int:
    """Weights of the embedding, or of the head."""
    return problem.vocab * problem.hidden_size


def matrix_parameters(problem: TrainStep) -> int:
    """All weights of the model as trained but norms and biases."""
    return vocab_parameters(problem) * (1 if problem.tied else 2) + problem.depth * layer_matmul_parameters(problem)


def parameters(problem: TrainStep) -> int:
    """All weights of the model as trained, biases not counted."""
    norms = 2 * problem.hidden_size + (2 * problem.head_dim if problem.architecture.startswith("qwen3") else 0)
    return matrix_parameters(problem) + problem.depth * norms + problem.hidden_size


def flops_per_token(problem: TrainStep) -> int:
    """6 N + 12 L H D S: forward and backward of every matrix product, N weights without the embedding's lookup but with
    the head, plus attention's two products over the whole sequence (torchtitan's count: no discount for causality, and
    what checkpointing computes again is not counted)."""
    weights = problem.depth * layer_matmul_parameters(problem) + vocab_parameters(problem)
    return 6 * weights + 12 * problem.depth * problem.heads * problem.head_dim * problem.seq_length


def step_flops(problem: TrainStep, tp_size: int) -> int:
    """Of one rank in one step."""
    return flops_per_token(problem) * problem.tokens * problem.accumulate // tp_size


@dataclass(frozen=True)
class Memory:
    """Bytes that a rank is expected to need."""

    model: int
    gradients: int
    optimizer: int
    activations: int
    gradients_stay: bool
    """Whether there are gradients while all activations are held; else they come as activations go."""

    @property
    def total(self) -> int:
        passing = self.gradients + self.activations if self.gradients_stay else max(self.gradients, self.activations)
        return self.model + self.optimizer + passing


def memory(problem: TrainStep, variant: str, tp_size: int, dp_size: int, *, on_gpus: bool = True) -> Memory:
    """Estimated beforehand: as the backward pass begins; AutoTP's, where that is more, with its first gradient or in
    its update. Fragmentation and other buffers of collectives are not in it.

    Parameters and what belongs to them by how the variant shards them; activations by the tensors that one layer keeps
    for its backward pass. On H200s, Qwen3 of 0.6B to 32B, peaks were 0.89 to 1.12 times this. On a CPU the memory of
    AutoTP's buffers that is not written to is none.
    """
    stored = ITEM_BYTES[problem.stored_dtype]
    held = _parameters_of_a_rank(problem, variant, tp_size)
    states = 2 * held * stored
    model, gradients = held * stored, held * stored
    buffers = 0
    if variant == "autotp":
        if problem.zero_stage:
            buffers = 2 * BUFFER * ITEM_BYTES[problem.dtype] if on_gpus else 0
            states = -(-3 * held * stored // dp_size)  # two moments and a flat copy of the parameters
            updated = -(-held * stored // dp_size)
            gradients = updated + (updated if problem.zero_stage == 2 else gradients)  # flat for the update, and as is
    elif variant != "ddp":
        model, gradients, states = (-(-each // dp_size) for each in (model, gradients, states))
    # The buffers come with the first gradient, when the logits are gone, and stay until the update.
    logits = _logits(problem, variant, tp_size)
    passing = logits + buffers if problem.accumulate > 1 else max(logits, buffers)
    copies = held * ITEM_BYTES[problem.dtype] if problem.autocast else 0  # of the parameters, for products
    activations = _activations(problem, variant, tp_size) + passing + copies
    kept = variant == "ddp" or problem.accumulate > 1  # ddp's are views of its buckets
    return Memory(model, gradients, states, activations, kept)


def _parameters_of_a_rank(problem: TrainStep, variant: str, tp_size: int) -> int:
    """Before any sharding over replicas. AutoTP keeps an untied embedding whole."""
    whole = vocab_parameters(problem) if variant == "autotp" and (not problem.tied or not problem.vocab_parallel) else 0
    return whole + -(-(parameters(problem) - whole) // tp_size)


def _activations(problem: TrainStep, variant: str, tp_size: int) -> int:
    """What the layers keep."""
    stored, compute = ITEM_BYTES[problem.stored_dtype], ITEM_BYTES[problem.dtype]
    across = 1 if variant == "autotp" else tp_size  # sequence parallelism shards what lies between the products too
    hidden = problem.hidden_size / across
    queries, keys = problem.heads * problem.head_dim / tp_size, problem.kv_heads * problem.head_dim / tp_size
    # Two norms' inputs, and their outputs as the products' inputs; queries, keys and values with their rotated copies,
    # attention's output; gate, up, their activation and product.
    norms = 2 * (stored * hidden + compute * problem.hidden_size)
    attention = compute * (4 * queries + 3 * keys)
    if problem.architecture.startswith("qwen3"):
        attention += compute * (queries + keys)
    if problem.attention == "eager":
        attention += 2 * problem.heads / tp_size * problem.seq_length * compute
    one_layer = norms + attention + compute * 4 * problem.ffn_size / tp_size
    kept = problem.depth * one_layer
    if problem.activation_checkpointing:
        kept = problem.depth * hidden * stored + one_layer
    return round(problem.tokens * kept)


def _logits(problem: TrainStep, variant: str, tp_size: int) -> int:
    """The head's, and what the loss makes of them."""
    columns = problem.vocab / (tp_size if problem.vocab_parallel else 1)
    logits = columns * 2 * ITEM_BYTES[problem.dtype]  # and their gradient
    if problem.train_loss == "torch":  # in fp32: logarithms of probabilities, their gradient; DTensor's, one more
        logits += columns * (12 if problem.vocab_parallel and variant.startswith("fsdp_dtensor") else 8)
    return round(problem.tokens * logits)


def bytes_communicated(problem: TrainStep, variant: str, tp_size: int, dp_size: int) -> int:
    """Bytes that a rank sends in a step: all collectives on activations, logits and parameters, each as a ring.

    Under autocast the residual stream is in the parameters' dtype, what leaves a product in the computation's.
    """
    numbers = _autotp_numbers(problem) if variant == "autotp" else _sequence_parallel_numbers(problem)
    tensor = problem.accumulate * problem.tokens * numbers * (tp_size - 1) // tp_size
    return tensor + _replicas_bytes(problem, variant, tp_size) * (dp_size - 1) // dp_size


def _autotp_numbers(problem: TrainStep) -> int:
    """Bytes of a token's activations times how often they cross the wire whole: an all-reduce is twice that."""
    stored, compute = ITEM_BYTES[problem.stored_dtype], ITEM_BYTES[problem.dtype]
    embedding = problem.tied and problem.vocab_parallel  # else each rank has all its rows
    head = problem.vocab_parallel or not problem.tied
    # Sums behind o and down, once more where they are computed again (the last is not needed then); in the backward
    # pass one for each of q, k, v, gate and up.
    forward = problem.depth * (3 if problem.activation_checkpointing else 2)
    numbers = 2 * problem.hidden_size * (forward * compute + (5 * problem.depth + head + embedding) * stored)
    gathered = not problem.vocab_parallel and not problem.tied
    return numbers + (problem.vocab * compute if gathered else 0)


def _sequence_parallel_numbers(problem: TrainStep) -> int:
    """The same of gathers before and scatters behind attention, feed-forward and, of one each, embedding and head."""
    stored, compute = ITEM_BYTES[problem.stored_dtype], ITEM_BYTES[problem.dtype]
    normed, summed = 4 * problem.depth + 4, 4 * problem.depth
    if problem.activation_checkpointing:  # both gathers of a layer again, and the first of its scatters
        normed, summed = normed + 2 * problem.depth, summed + problem.depth
    numbers = problem.hidden_size * (normed * stored + summed * compute)
    return numbers + (0 if problem.vocab_parallel else problem.vocab * compute)


def _replicas_bytes(problem: TrainStep, variant: str, tp_size: int) -> int:
    """Bytes of what replicas all-gather or reduce-scatter; an all-reduce is both."""
    stored = ITEM_BYTES[problem.stored_dtype]
    held = _parameters_of_a_rank(problem, variant, tp_size)
    if variant == "ddp" or (variant == "autotp" and not problem.zero_stage):
        return 2 * held * stored
    if variant == "autotp":  # ZeRO all-reduces gradients, stage 2 those of each micro-batch, and gathers parameters
        looked_up = 0 if problem.tied else vocab_parameters(problem)
        gradients = looked_up * stored + (held - looked_up) * ITEM_BYTES[problem.dtype]  # of products in their dtype
        return 2 * gradients * (problem.accumulate if problem.zero_stage == 2 else 1) + held * stored
    # Gathered for each forward and each backward pass; what is used last and first again is kept between them.
    kept = problem.hidden_size + vocab_parameters(problem) // tp_size
    return ((2 * problem.accumulate + 1) * held - problem.accumulate * kept) * stored
