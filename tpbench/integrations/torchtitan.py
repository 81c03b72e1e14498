"""torchtitan: a loss that a configuration names, alone or within the chunked wrapper.

config.loss = EntropyLoss.Config(global_vocab_size=vocab)
config.loss = ChunkedLossWrapper.Config(loss_fn=EntropyLoss.Config(global_vocab_size=vocab))
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tpbench.integrations.patches import check_version, columns_of_rank, entropy_loss_of

VERSIONS = ("0.3.0", "0.3.0")
check_version("torchtitan", *VERSIONS)

import spmd_types as spmd  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate  # noqa: E402
from torch.distributed.tensor.experimental import local_map  # noqa: E402
from torchtitan.components.loss import IGNORE_INDEX, CrossEntropyLoss  # noqa: E402
from torchtitan.distributed.spmd_types import current_spmd_mesh, spmd_mesh_size  # noqa: E402


class EntropyLoss(CrossEntropyLoss):  # type: ignore[misc]
    """torchtitan's cross-entropy by the kernels: no logits in fp32, and one exchange between tensor-parallel ranks.

    Logits may be whole, this rank's columns, or DTensors. The number of tokens divides the gradient before it is
    rounded. `compile` of torchtitan's configuration doesn't concern it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CrossEntropyLoss.Config):  # type: ignore[misc]
        in_place: bool = False
        """The gradient overwrites the logits, and so needs no memory."""

    def __init__(self, config: Config, *, compile_config: Any = None) -> None:
        super().__init__(config)
        self.in_place = config.in_place

    def __call__(
        self, pred: Tensor, labels: Tensor, global_valid_tokens: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the sum of the losses of tokens, divided by `global_valid_tokens`, and no metrics."""
        is_checked = spmd.is_type_checking()
        with spmd.no_typecheck():
            loss = self._loss(pred, labels, global_valid_tokens)
            if is_checked:
                spmd.assert_type(loss, {"dp": spmd.P, "cp": spmd.P, "tp": spmd.I})
        return loss, {}

    def _loss(self, pred: Tensor, labels: Tensor, tokens: Tensor | None) -> Tensor:
        if not isinstance(pred, DTensor):
            group = current_spmd_mesh().get_group("tp") if spmd_mesh_size("tp") > 1 else None
            vocab = pred.shape[-1] if self.global_vocab_size is None else self.global_vocab_size
            return self._local(pred, labels, tokens=tokens, group=group, vocab=vocab)
        mesh, last = pred.device_mesh, pred.dim() - 1
        of_vocab = [placement.is_shard(last) for placement in pred.placements]
        group = mesh.get_group(of_vocab.index(True)) if any(of_vocab) else None
        local = functools.partial(self._local, tokens=tokens, group=group, vocab=pred.shape[-1])
        if not isinstance(labels, DTensor):
            return local(pred.to_local(), labels)
        sums = [
            Partial() if placement.is_shard() and not vocab else Replicate()
            for placement, vocab in zip(pred.placements, of_vocab, strict=True)
        ]
        places = (pred.placements, labels.placements)
        return local_map(local, sums, places, places, mesh)(pred, labels)

    def _local(self, pred: Tensor, labels: Tensor, *, tokens: Tensor | None, group: Any, vocab: int) -> Tensor:
        settings = columns_of_rank(group, vocab)
        loss_of = entropy_loss_of(reduction="sum", ignore_index=IGNORE_INDEX, in_place=self.in_place, **settings)
        return loss_of(pred.flatten(0, -2), labels.flatten(), divisor=tokens)
