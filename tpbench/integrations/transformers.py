"""Transformers, with its Trainer, and what is built on them, such as axolotl: the loss of causal language models.

with tpbench.integrations.transformers.patched():
    trainer.train()
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from tpbench.integrations.patches import Patch, check_version, columns_of_rank, entropy_loss_of

VERSIONS = ("5.17.0", "5.24.0")


def patched(tp_group: torch.distributed.ProcessGroup | None = None, in_place: bool = False) -> Patch:
    """Replace the loss of causal language models (`ForCausalLMLoss`) until the patch is undone.

    A model whose `lm_head` is "colwise" in its tensor-parallel plan has logits of this rank's columns. They are not
    gathered: pass `tp_group`, the group of the plan's mesh. DTensors name their group themselves.

    in_place: the gradient overwrites the logits, and so needs no memory. Nothing may read `outputs.logits` afterwards.
    """
    check_version("transformers", *VERSIONS)
    from transformers.loss import loss_utils

    patch = Patch()
    loss = functools.partial(causal_lm_loss, tp_group=tp_group, in_place=in_place)
    for name, function in list(loss_utils.LOSS_MAPPING.items()):
        if function is loss_utils.ForCausalLMLoss:
            patch.replace(loss_utils.LOSS_MAPPING, name, loss)
    return patch


def causal_lm_loss(
    logits: Tensor,
    labels: Any,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    *,
    tp_group: torch.distributed.ProcessGroup | None = None,
    in_place: bool = False,
    **_: Any,
) -> Tensor:
    """Return the loss of `ForCausalLMLoss`, with its arguments, without logits in fp32.

    The mean over no labels is 0, not NaN. A label that is no column of the vocabulary is ignored.
    """
    if shift_labels is None:
        shift_labels = torch.nn.functional.pad(labels[..., 1:], (0, 1), value=ignore_index)
    targets = shift_labels.reshape(-1).to(logits.device)
    rows = logits.reshape(-1, logits.shape[-1])
    columns = columns_of_rank(tp_group, vocab_size) if rows.shape[1] != vocab_size else {}
    if rows.shape[1] != vocab_size and not columns:
        raise ValueError(
            f"the logits have {rows.shape[1]} of {vocab_size} columns: pass patched(tp_group=...), the "
            "group that shards the head"
        )
    settings = {"ignore_index": ignore_index, "in_place": in_place, **columns}
    if num_items_in_batch is None:
        return entropy_loss_of(**settings)(rows, targets)
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(logits.device).squeeze()
    return entropy_loss_of(reduction="sum", **settings)(rows, targets, divisor=num_items_in_batch)
