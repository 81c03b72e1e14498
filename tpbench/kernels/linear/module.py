"""`LinearEntropyLoss`: the head's product and the entropy loss as one torch module."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tpbench.kernels.entropy.module import scale_rows
from tpbench.kernels.linear.function import linear_entropy_loss

_MADE_BY_MODULE = {"bias", "grad", "row_grad", "entropy_grad", "weight_grad"}
_SETTINGS = {
    name for name, each in inspect.signature(linear_entropy_loss).parameters.items() if each.kind is each.KEYWORD_ONLY
} - _MADE_BY_MODULE


class LinearEntropyLoss(torch.nn.Module):
    """The autograd version of `linear_entropy_loss`: it takes hidden states and the head's weight, and no logits.

    `settings` are the keyword arguments of `linear_entropy_loss` except those for gradients and the bias.

    With reduction="mean" or "sum", forward also computes the gradients of hidden states, weight and bias, and backward
    multiplies them by the upstream gradient, in place. If that is 1, which is tested on the device, nothing is
    written. A second backward through the same forward raises RuntimeError.

    With reduction="none", loss="logprob", entropy=True or fp16 hidden states, forward computes no gradient, and
    backward computes the logits of each chunk again. This costs a fourth product. It is needed because every row has
    its own upstream gradient then, or because a loss scaler must act before the gradient is rounded to fp16.

    Targets and the teacher get no gradient. Under torch.autocast, hidden states, weights and bias are cast as by
    torch.nn.functional.linear. torch.compile leaves the module out of its graphs.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        unknown = sorted(settings.keys() - _SETTINGS)
        if unknown:
            raise TypeError(
                f"LinearEntropyLoss has no setting {', '.join(unknown)}; there are {', '.join(sorted(_SETTINGS))}"
            )
        if settings.get("loss") == "logprob":
            settings = {"reduction": "none", "entropy": True, **settings}
        self.settings = settings

    def forward(
        self, hidden: Tensor, weight: Tensor, target: Tensor | tuple[Tensor, Tensor], bias: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the loss, an fp32 scalar, or (rows,) with reduction="none". With entropy=True, also (rows,) entropies.

        loss="logprob" returns log-probabilities and entropies, (rows,) each, unless other settings are chosen.
        hidden: (rows, h). weight: (local vocab, h). bias: (local vocab,).
        """
        if torch.compiler.is_compiling():
            from tpbench.kernels.eager import eager

            compiled: Tensor | tuple[Tensor, Tensor] = eager(self._forward, hidden, weight, target, bias)
            return compiled
        return self._forward(hidden, weight, target, bias)

    def _forward(
        self, hidden: Tensor, weight: Tensor, target: Tensor | tuple[Tensor, Tensor], bias: Tensor | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        device = hidden.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            factors = (hidden.to(dtype), weight.to(dtype))
            if isinstance(target, (tuple, list)):
                target = (target[0].to(dtype), target[1].to(dtype))
            with torch.autocast(device, enabled=False):
                return self._forward(*factors, target, None if bias is None else bias.to(dtype))
        tensors = [each for each in (hidden, weight, bias) if each is not None]
        if not (torch.is_grad_enabled() and any(each.requires_grad for each in tensors)):
            result = linear_entropy_loss(hidden, weight, target, bias=bias, grad=False, **self.settings)
            return result.loss if result.entropy is None else (result.loss, result.entropy)
        recompute = (
            self.settings.get("reduction", "mean") == "none"
            or bool(self.settings.get("entropy"))
            or hidden.dtype == torch.float16
        )
        apply: Any = (_GradientsInBackward if recompute else _GradientsInForward).apply
        results: Tensor | tuple[Tensor, Tensor] = apply(hidden, weight, bias, target, self.settings)
        return results

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.settings.items())


class _GradientsInForward(torch.autograd.Function):
    """The loss whose forward computes the gradients, and whose backward scales them."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Any, settings: dict[str, Any]
    ) -> Tensor:
        result = linear_entropy_loss(hidden, weight, target, bias=bias, **settings)
        ctx.grads = (result.grad_hidden, result.grad_weight, result.grad_bias)
        return result.loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("LinearEntropyLoss gave its gradients to an earlier backward: run forward again")
        grads, ctx.grads = ctx.grads, None
        for grad in grads:
            if grad is not None:
                scale_rows(grad.view(1, -1) if grad.dim() == 1 else grad, upstream.contiguous())
        return (*grads, None, None)


class _GradientsInBackward(torch.autograd.Function):
    """The loss whose backward computes the logits again, and the gradients from them."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Any, settings: dict[str, Any]
    ) -> Tensor | tuple[Tensor, Tensor]:
        ctx.settings = settings
        targets = target if isinstance(target, (tuple, list)) else (target,)
        ctx.save_for_backward(hidden, weight, bias, *targets)
        result = linear_entropy_loss(hidden, weight, target, bias=bias, grad=False, **settings)
        return result.loss if result.entropy is None else (result.loss, result.entropy)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *entropy_upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, *targets = ctx.saved_tensors
        target = targets[0] if len(targets) == 1 else tuple(targets)
        sharded = ctx.settings.get("hidden_sharded") and ctx.settings.get("group") is not None
        rows = len(hidden) * (ctx.settings["group"].size() if sharded else 1)
        result = linear_entropy_loss(
            hidden,
            weight,
            target,
            bias=bias,
            row_grad=upstream.float().expand(rows).contiguous(),
            entropy_grad=entropy_upstream[0].float().contiguous() if entropy_upstream else None,
            **ctx.settings,
        )
        return result.grad_hidden, result.grad_weight, result.grad_bias, None, None
