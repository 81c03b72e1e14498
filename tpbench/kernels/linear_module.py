"""`LinearEntropyLoss`, the linear loss as a torch module."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from tpbench.kernels import checks
from tpbench.kernels.derivatives import GradientsInBackward, GradientsInForward, outside_of_graphs
from tpbench.kernels.linear.function import LinearEntropyLossResult, linear_entropy_loss
from tpbench.kernels.modules import LossModule, learns_from
from tpbench.kernels.row_loss import TopK


class LinearEntropyLoss(LossModule):
    """The autograd version of `linear_entropy_loss`: it takes hidden states and the head's weight, and no logits.

    `settings` are the keyword arguments of `linear_entropy_loss` except those for gradients and the bias.

    The gradient of the hidden states is already summed over the ranks: a hook or layer that sums it must be left out.
    Of hidden states, weight and bias, those that require no gradient get none, and cost no product for it. With
    reduction="mean" or "sum", forward also computes the gradients, and backward multiplies them by the upstream
    gradient, in place. If that is 1, which is tested on the device, nothing is written. A second backward through the
    same forward raises RuntimeError.

    With reduction="none", loss="logprob", entropy=True or fp16 hidden states, forward computes no gradient, and
    backward computes the logits of each chunk again. This costs a fourth product. It is needed because every row has
    its own upstream gradient then, or because a loss scaler must act before the gradient is rounded to fp16.

    Under torch.autocast, hidden states, weights and bias are cast as by torch.nn.functional.linear. torch.compile
    leaves the module out of its graphs.
    """

    def __init__(self, **settings: Any) -> None:
        if settings.get("loss") == "logprob":
            settings = {"reduction": "none", "entropy": True, **settings}
        super().__init__(linear_entropy_loss, {"bias", "grad", "weight_grad"}, settings)

    @outside_of_graphs
    def forward(
        self, hidden: Tensor, weight: Tensor, target: Tensor | TopK | tuple[Tensor, Tensor], bias: Tensor | None = None,
        **rows: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """Return the loss, an fp32 scalar, or (rows,) with reduction="none". With entropy=True, also (rows,) entropies.

        loss="logprob" returns log-probabilities and entropies, (rows,) each, unless other settings are chosen.
        hidden: (rows, h). weight: (local vocab, h). bias: (local vocab,). rows: as for `EntropyLoss`.
        """
        rows = {name: value for name, value in rows.items() if value is not None}
        weight, bias = self.local("weight", weight, 0), self.local("bias", bias, 0)
        placements = getattr(hidden, "placements", None)
        of_hidden = {"hidden_sharded": placements[0].is_shard(0)} if placements else {}
        hidden = self.local("hidden", hidden, 0, or_replicated=True)
        inputs = {"hidden": hidden, "weight": weight} | ({} if bias is None else {"bias": bias})
        named = self.arguments(target, rows, **inputs) | of_hidden
        device = hidden.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            if isinstance(target, (tuple, list)) and not isinstance(target, TopK):
                target = cast("Any", tuple([tensor.to(dtype) for tensor in target]))
            hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        self.check_columns("weight", len(weight) if weight.dim() else 0, weight.device)
        recompute = self.options.reduction == "none" or self.options.entropy or hidden.dtype == torch.float16
        learning = [learns_from(tensor) for tensor in (hidden, weight, bias)]

        def compute() -> tuple[Tensor, tuple[Tensor | None, ...], float]:
            result, gradients = _computed((hidden, weight, bias), target, named, learning)
            return self.kept(result).loss, gradients, 1.0

        with torch.autocast(device, enabled=False):
            if recompute or not any(learning):
                return GradientsInBackward.apply(_computed, self.kept, (target, named), hidden, weight, bias)
            return GradientsInForward.apply(compute, hidden, weight, bias)


def _computed(
    inputs: Sequence[Any], target: Any, named: dict[str, Any], wanted: Sequence[bool]
) -> tuple[LinearEntropyLossResult, tuple[Tensor | None, ...]]:
    hidden, weight, bias = inputs
    learning: Any = [*itertools.compress(checks.LINEAR_INPUTS, wanted)]
    result = linear_entropy_loss(hidden, weight, target, bias=bias, grad=learning, **named)
    return result, (result.grad_hidden, result.grad_weight, result.grad_bias)
