"""Count the bytes by which a model's plan changes the communication of the usual pairs of sharded layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tpbench.workloads.train_step.model.config_json import KNOWN_ARCHITECTURES
from tpbench.workloads.train_step.model.decoder_parts import decoder_layers
from tpbench.workloads.train_step.problem import ITEM_BYTES, TrainStep
from tpbench.workloads.train_step.sharding.plan import Block, blocks


def bytes_beside_pairs(problem: TrainStep, variant: str) -> int:
    """Return the bytes for one token that blocks with other layers than colwise and rowwise add, all layers together.

    The number is negative for replicated blocks. The model is made without weights.
    """
    if problem.architecture in KNOWN_ARCHITECTURES and problem.tp_mapping is None:
        return 0
    from tpbench.workloads.train_step.model.models import build

    depth = problem.depth if problem.tp_mapping else 1  # without a mapping all layers have one plan
    model = build(replace(problem, num_layers=depth))
    count = _autotp_block if variant == "autotp" else _sequence_parallel_block
    added = sum(count(problem, model, block, index % 2 == 0) for index, block in enumerate(blocks(problem, model)))
    # DTensor all-reduces Gemma's embedding for its factor, where a reduce-scatter would suffice.
    scaled = variant == "dtensor_tp" and hasattr(model.get_input_embeddings(), "scalar_embed_scale")
    return added * problem.depth // depth + scaled * problem.hidden_size * ITEM_BYTES[problem.stored_dtype]


def _sequence_parallel_block(problem: TrainStep, model: Any, block: Block, first: bool) -> int:
    """`first`: the block is the first one of its layer. Checkpointing repeats its forward pass to the end."""
    stored, compute = ITEM_BYTES[problem.stored_dtype], ITEM_BYTES[problem.dtype]
    repeated = problem.activation_checkpointing
    if block.replicated:
        # A replicated block scatters no outputs and no gradients of inputs.
        return -problem.hidden_size * (stored + compute * (2 if repeated and first else 1))
    gathered = problem.hidden_size if repeated and not first and _normed_output(model) else 0
    for name, style in block.styles.items():
        layer = model.get_submodule(name)
        if style == "colwise_gather_output":
            gathered += layer.out_features * (2 if repeated else 1)
        elif style == "rowwise_split_input":
            gathered += layer.in_features  # the gradients of the input's columns
    return gathered * compute


def _autotp_block(problem: TrainStep, model: Any, block: Block, first: bool) -> int:
    stored, compute = ITEM_BYTES[problem.stored_dtype], ITEM_BYTES[problem.dtype]
    backward = 3 if first else 2  # queries, keys and values; or gate and up
    if not block.replicated:
        repeated = problem.activation_checkpointing and not first and _normed_output(model)
        fewer = backward - sum(style.startswith("colwise") for style in block.styles.values())  # no gate; one product
        pairs = 2 * problem.hidden_size * (compute * repeated - stored * fewer)
        return pairs + _gathered_columns(problem, model, block) * compute
    forward = 2 if problem.activation_checkpointing and first else 1
    return -2 * problem.hidden_size * (forward * compute + backward * stored)


def _gathered_columns(problem: TrainStep, model: Any, block: Block) -> int:
    """Return the columns that AutoTP all-gathers forward, and twice those whose gradients it all-reduces."""
    columns = 0
    for name, style in block.styles.items():
        layer = model.get_submodule(name)
        if style == "colwise_gather_output":
            columns += layer.out_features * (2 if problem.activation_checkpointing else 1)
        elif style == "rowwise_split_input":
            columns += 2 * layer.in_features
    return columns


def _normed_output(model: Any) -> bool:
    """Return whether a norm follows a layer's last block. A repeated layer then needs the block's output."""
    layer = decoder_layers(model)[0]
    return any(hasattr(layer, name) for name in ("post_feedforward_layernorm", "post_mlp_layernorm"))
