"""Estimate the memory of a rank from a problem's fields alone, before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

from tpbench.workloads.train_step.estimates.rank_sizes import parameters_per_rank
from tpbench.workloads.train_step.problem import ITEM_BYTES, TrainStep
from tpbench.workloads.train_step.sharding.block_styles import layer_styles
from tpbench.workloads.train_step.sharding.key_value_heads import head_share, repeats_heads

ZERO_BUFFER_ELEMENTS = 500_000_000
"""Elements of each of the two buffers in which DeepSpeed's ZeRO reduces gradients (DeepSpeed's default)."""
LINEAR_LOSS_GIB = 0.5
"""Memory for the logits of a chunk of the linear loss: `AUTO_GIB` of tpbench/kernels/linear/chunks.py, which needs
torch."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that a rank is expected to need."""

    model: int
    gradients: int
    optimizer: int
    activations: int
    gradients_persist: bool
    """True if gradients exist while all activations are held. False if gradients appear only as activations go."""

    @property
    def total(self) -> int:
        """Peak of all parts together, in bytes."""
        both = (self.gradients, self.activations)
        return self.model + self.optimizer + (sum(both) if self.gradients_persist else max(both))


def estimate_memory(
    problem: TrainStep, variant: str, tp_size: int, dp_size: int, *, on_gpus: bool = True
) -> MemoryEstimate:
    """Estimate the peak memory of a rank as the backward pass begins.

    For AutoTP, the peak may come later: with the first gradient, or in the update. The estimate leaves out
    fragmentation and other buffers of collectives. It follows how the variant shards parameters, and which tensors a
    layer keeps for its backward pass. For Qwen3 of 0.6B to 32B on H200s, measured peaks were 0.89 to 1.12 times the
    estimate. On a CPU (`on_gpus=False`), AutoTP's buffers are not counted: memory that nothing writes to is not taken.
    """
    stored = ITEM_BYTES[problem.stored_dtype]
    held = parameters_per_rank(problem, variant, tp_size)
    states = 2 * held * stored
    model, gradients = held * stored, held * stored
    buffers = 0
    if variant == "autotp":
        if problem.zero_stage:
            buffers = 2 * ZERO_BUFFER_ELEMENTS * ITEM_BYTES[problem.dtype] if on_gpus else 0
            states = -(-3 * held * stored // dp_size)  # two moments and a flat copy of the parameters
            updated = -(-held * stored // dp_size)
            # Gradients exist twice: flat, for the update, and as the backward pass made them.
            gradients = updated + (updated if problem.zero_stage == 2 else gradients)
    elif variant != "ddp":
        model, gradients, states = (-(-size // dp_size) for size in (model, gradients, states))
    # ZeRO allocates the buffers with the first gradient, after the logits are freed, and keeps them until the update.
    logits = _logits_bytes(problem, variant, tp_size)
    logits_and_buffers = logits + buffers if problem.accumulate > 1 else max(logits, buffers)
    autocast_copies = held * ITEM_BYTES[problem.dtype] if problem.autocast else 0
    activations = _layers_bytes(problem, variant, tp_size) + logits_and_buffers + autocast_copies
    persist = variant == "ddp" or problem.accumulate > 1  # DDP's gradients are views of its buckets
    return MemoryEstimate(model, gradients, states, activations, persist)


def _layers_bytes(problem: TrainStep, variant: str, tp_size: int) -> int:
    """Return the bytes that the decoder layers keep for their backward passes."""
    stored, compute = ITEM_BYTES[problem.stored_dtype], ITEM_BYTES[problem.dtype]
    # Sequence parallelism also shards the tensors between the matrix products. AutoTP has no sequence parallelism.
    hidden = problem.hidden_size / (1 if variant == "autotp" else tp_size)
    # Kept: the inputs of two norms, and their outputs as inputs of products; queries, keys and values, with the rotated
    # copies of queries and keys; attention's output; gate, up, the activated gate and their product, or without a gate
    # only up and the activated up.
    norms = 2 * (stored * hidden + compute * problem.hidden_size)
    rotated = 2 if problem.architecture.startswith("qwen3") else 1  # Qwen3 also keeps them before their norms
    key_values = problem.kv_heads
    if repeats_heads(problem, variant, tp_size):
        key_values = tp_size * len(head_share(problem, tp_size, 0).key_values)
    heads = (3 + rotated) * problem.heads + (2 + rotated) * key_values
    attention = compute * heads * problem.head_dim
    if problem.attention == "eager":
        attention += 2 * problem.heads * problem.seq_length * compute
    feed_forward = compute * (4 if problem.ffn_matrices == 3 else 2) * problem.ffn_size
    # A rank has its share of the columns in column-wise layers, and all columns in gathered and replicated ones.
    layers = [
        norms
        + attention / (tp_size if styles.attention == "colwise" else 1)
        + feed_forward / (tp_size if styles.feed_forward == "colwise" else 1)
        for styles in layer_styles(problem)
    ]
    per_token = sum(layers)
    if problem.activation_checkpointing:
        per_token = problem.depth * hidden * stored + max(layers)
    return round(problem.tokens * per_token)


def _logits_bytes(problem: TrainStep, variant: str, tp_size: int) -> int:
    """Return the bytes of the head's logits, their gradient, and the tensors that the loss derives from them.

    The linear loss has the logits of a chunk of tokens, and keeps the gradients of its inputs from the forward pass on.
    """
    columns = problem.vocab / (tp_size if problem.vocab_parallel else 1)
    if problem.train_loss == "tpbench_linear":
        item = ITEM_BYTES[problem.dtype]
        chunk = min(problem.tokens * columns * item, LINEAR_LOSS_GIB * 2**30)
        tokens = problem.tokens / (1 if variant in ("autotp", "dtensor_tp") else tp_size)
        return round(chunk + (columns + tokens) * problem.hidden_size * item)
    per_token = columns * 2 * ITEM_BYTES[problem.dtype]  # logits and their gradient
    if problem.train_loss == "torch":  # in fp32: log-probabilities and their gradient; with DTensor, one copy more
        per_token += columns * (12 if problem.vocab_parallel and "dtensor" in variant else 8)
    return round(problem.tokens * per_token)
