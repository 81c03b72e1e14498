"""`LinearEntropyLoss`, the linear loss as a torch module, and gradients that its backward computes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from tpbench.kernels import checks
from tpbench.kernels.derivatives import GradientsInForward, outside_of_graphs
from tpbench.kernels.linear.function import linear_entropy_loss
from tpbench.kernels.modules import LossModule, learns_from
from tpbench.kernels.row_loss import TopK


class GradientsInBackward(torch.autograd.Function):
    """A linear loss whose backward, if it comes, computes the logits again, and the gradients from them."""

    @staticmethod
    def forward(
        ctx: Any, kept: Callable[..., Any], others: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Any:
        """`kept` receives the result. `others`: the target, and the other arguments of the function by name."""
        # Autograd then raises an error if a tensor is changed before backward.
        leaves, ctx.tree = tree_flatten((hidden, weight, bias, *others))
        ctx.save_for_backward(*[leaf if isinstance(leaf, Tensor) else None for leaf in leaves])
        ctx.leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        target, named = others
        result = kept(linear_entropy_loss(hidden, weight, target, bias=bias, grad=False, **named))
        ctx.rows = len(result.row_loss)
        return (result.loss, result.entropy) if named.get("entropy") else result.loss

    @staticmethod
    @outside_of_graphs
    def backward(ctx: Any, upstream: Tensor, *entropy_upstream: Tensor) -> tuple[Tensor | None, ...]:
        checks.first_derivative()
        saved = zip(ctx.leaves, ctx.saved_tensors, strict=True)
        leaves = [leaf if tensor is None else tensor for leaf, tensor in saved]
        hidden, weight, bias, target, named = tree_unflatten(leaves, ctx.tree)
        named["row_grad"] = upstream.float().expand(ctx.rows).contiguous()
        if entropy_upstream:
            named["entropy_grad"] = entropy_upstream[0].float().contiguous()
        wanted: Any = list(itertools.compress(checks.LINEAR_INPUTS, ctx.needs_input_grad[2:]))
        result = linear_entropy_loss(hidden, weight, target, bias=bias, grad=wanted, **named)
        return None, None, result.grad_hidden, result.grad_weight, result.grad_bias


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
        learning: Any = [name for name, tensor in inputs.items() if learns_from(tensor)]

        def compute() -> tuple[Tensor, tuple[Tensor | None, ...], float]:
            result = self.kept(linear_entropy_loss(hidden, weight, target, bias=bias, grad=learning, **named))
            return result.loss, (result.grad_hidden, result.grad_weight, result.grad_bias), 1.0

        with torch.autocast(device, enabled=False):
            if recompute or not learning:
                return GradientsInBackward.apply(self.kept, (target, named), hidden, weight, bias)
            return GradientsInForward.apply(compute, hidden, weight, bias)
