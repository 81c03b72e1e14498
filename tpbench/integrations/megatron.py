"""Megatron-core: the loss of language models over logits that tensor-parallel ranks share, also of MTP heads.

with tpbench.integrations.megatron.patched():
    train(model)
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tpbench.integrations.patches import Patch, check_version, columns_of_rank, entropy_loss_of, linear_loss_of

VERSIONS = ("0.16.1", "0.19.2")


def patched(vocab_size: int | None = None, in_place: bool = False) -> Patch:
    """Replace `LanguageModule.compute_language_model_loss` until the patch is undone.

    vocab_size: columns at and past it are padding, outside the softmax and without a gradient. None: all columns count,
    as in Megatron's own loss.

    in_place: the gradient overwrites the logits, and so needs no memory. MTP heads read their logits after the loss.
    """
    check_version("megatron-core", *VERSIONS)
    from megatron.core.models.common.language_module.language_module import LanguageModule

    def compute_language_model_loss(self: Any, labels: Tensor, logits: Tensor) -> Tensor:
        if in_place and self.config.mtp_num_layers:
            raise ValueError("in_place must be False for MTP heads, which read their logits after the loss")
        group = self.pg_collection.tp
        columns = columns_of_rank(group, logits.shape[-1] * group.size())
        columns |= {} if vocab_size is None else {"vocab_size": vocab_size}
        loss_of = entropy_loss_of(reduction="none", in_place=in_place, **columns)
        losses = loss_of(logits.flatten(0, 1), labels.transpose(0, 1).flatten())
        return losses.view(logits.shape[:2]).transpose(0, 1).contiguous()

    patch = Patch()
    patch.replace(LanguageModule, "compute_language_model_loss", compute_language_model_loss)
    return patch


def output_processor(
    *, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, labels: Tensor, **others: Any
) -> Tensor:
    """Return the losses, (batch, sequence), without logits: `model(..., output_processor=output_processor)`.

    It needs Megatron-core 0.19. The hidden states may be sharded along the sequence. MTP heads keep their logits.
    """
    config = others["config"]
    if config.use_mup:
        raise ValueError("output_processor has no scale for logits: config.use_mup must be False")
    weight = output_layer.weight if output_weight is None else output_weight
    group = output_layer.tp_group
    columns = columns_of_rank(group, len(weight) * group.size())
    loss_of = linear_loss_of(reduction="none", hidden_sharded=config.sequence_parallel, **columns)
    losses = loss_of(hidden_states.flatten(0, 1), weight, labels.transpose(0, 1).flatten())
    return losses.view(labels.shape[1], labels.shape[0]).transpose(0, 1).contiguous()
