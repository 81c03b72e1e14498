"""DeepSpeed's vocabulary-parallel embedding for a model whose head has a weight of its own."""

from __future__ import annotations

from typing import Any


def shard_untied_embedding(model: Any, group: Any) -> None:
    """Replace the input embedding by a shard of its vocabulary's rows on each rank of `group`.

    DeepSpeed itself shards an embedding over the vocabulary only if the head shares its weight. The module must be
    replaced before the engine is made, so that the optimizer gets the shard. The model must be on its device.
    """
    import deepspeed
    from deepspeed.module_inject.layers import VocabParallelEmbedding, set_autotp_mode

    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_init_required=False)  # DeepSpeed's wrapper of the existing process groups
    set_autotp_mode(training=True)  # otherwise the layer would freeze its weight
    embedding = VocabParallelEmbedding(model.get_input_embeddings(), group, name="embed_tokens")
    embedding.replaced = True  # AutoTP leaves such a module alone
    model.set_input_embeddings(embedding)
