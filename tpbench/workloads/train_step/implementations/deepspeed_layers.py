"""Layers of DeepSpeed that AutoTP itself does not put into a model, although it has them.

They must be in the model before the engine is made, so that the optimizer gets their shards. The model must be on its
device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tpbench.workloads.train_step.problem import TrainStep
from tpbench.workloads.train_step.sharding.plan import Block


def replace_layers(problem: TrainStep, model: Any, blocks: Sequence[Block], group: Any) -> None:
    """Replace the layers of blocks that gather columns, and an embedding that the head does not share.

    `group` shards them.
    """
    import deepspeed
    from deepspeed.module_inject.layers import set_autotp_mode

    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_init_required=False)  # DeepSpeed's wrapper of the existing process groups
    set_autotp_mode(training=True)  # otherwise the layers would freeze their weights
    for block in blocks:
        if block.gathers_columns:
            _gather_columns(model, block, group)
    if problem.vocab_parallel and not problem.tied:
        _shard_untied_embedding(model, group)


def _gather_columns(model: Any, block: Block, group: Any) -> None:
    """Shard the linear layers of a block in which every rank has all columns between the layers.

    AutoTP uses the row-wise layer, which takes its columns of a whole input, only for heads.
    """
    from deepspeed.module_inject.layers import LinearAllreduceWithReplicatedInput, LinearLayer

    for name, style in block.styles.items():
        linear = model.get_submodule(name)
        if style == "colwise_gather_output":
            sharded = LinearLayer(linear, group, gather_output=True, name=name)
        elif style == "rowwise_split_input":
            sharded = LinearAllreduceWithReplicatedInput(linear, group, name=name)
        else:
            continue
        sharded.replaced = True  # AutoTP leaves such a module alone
        model.set_submodule(name, sharded)
    model.get_submodule(block.name).replaced = True  # AutoTP would divide its number of heads by the number of ranks


def _shard_untied_embedding(model: Any, group: Any) -> None:
    """Replace the input embedding by a shard of its vocabulary's rows on each rank.

    AutoTP shards an embedding over the vocabulary only if the head shares its weight.
    """
    from deepspeed.module_inject.layers import VocabParallelEmbedding

    embedding = VocabParallelEmbedding(model.get_input_embeddings(), group, name="embed_tokens")
    embedding.replaced = True
    model.set_input_embeddings(embedding)


def take_embedding_scale(model: Any) -> Tensor | None:
    """Replace an embedding that scales its vectors, such as Gemma's, by a plain one with the same weight, which AutoTP
    can shard. Return the scale, or None for a plain embedding."""
    scaled = model.get_input_embeddings()
    if type(scaled) is nn.Embedding:
        return None
    plain = nn.Embedding(scaled.num_embeddings, scaled.embedding_dim, scaled.padding_idx, device="meta")
    plain.weight = scaled.weight
    model.set_input_embeddings(plain)
    return torch.tensor(scaled.scalar_embed_scale, device=scaled.weight.device)


def scale_embedding(model: Any, scale: Tensor) -> None:
    """Multiply the vectors of the sharded embedding by the scale, rounded to their dtype as the model does."""
    model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, vectors: vectors * scale.to(vectors.dtype)
    )
