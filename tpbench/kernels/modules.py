"""`EntropyLoss` and `LinearEntropyLoss`: the losses as torch modules, with autograd."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tpbench.kernels.entropy import checks
from tpbench.kernels.entropy.function import entropy_loss
from tpbench.kernels.linear.function import linear_entropy_loss
from tpbench.kernels.row_loss import fp16_gradient_scale
from tpbench.kernels.two_pass.scale import scale_rows


def _settings_of(function: Callable[..., Any], *made_by_module: str) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY} - set(
        made_by_module
    )


_ENTROPY_SETTINGS = _settings_of(entropy_loss, "grad", "row_grad", "entropy_grad", "entropy")
_LINEAR_SETTINGS = _settings_of(linear_entropy_loss, "bias", "grad", "row_grad", "entropy_grad", "weight_grad")


def _refuse_unknown(module: str, settings: dict[str, Any], known: set[str]) -> None:
    if unknown := sorted(settings.keys() - known):
        raise TypeError(f"{module} has no setting {', '.join(unknown)}; there are {', '.join(sorted(known))}")


class EntropyLoss(torch.nn.Module):
    """The autograd version of `entropy_loss`: forward computes loss and gradient, backward scales the gradient.

    `settings` are the keyword arguments of `entropy_loss` except grad, row_grad, entropy_grad and entropy. The gradient
    gets new memory. With in_place=True it overwrites the logits during forward, and nothing else may read them
    afterwards. An operation that saved them for its own backward, such as tanh, then raises RuntimeError. Target logits
    are constants: they get no gradient.

    Backward multiplies by the upstream gradient in fp32. The gradient was already rounded to the logits' dtype, so an
    upstream gradient that is no power of two causes a second rounding. grad_scale does not: pass known factors there.
    If the upstream gradient is 1, which is tested on the device, backward changes nothing. It works in place, so a
    second backward through the same forward raises RuntimeError.

    For fp16 logits and reduction="mean", the gradient is stored times a power of two near the number of rows, and
    backward divides by it. A loss scaler moves small gradients into fp16's range by the upstream gradient. That is too
    late for gradients that the division by the rows rounded to zero.

    torch.compile leaves the module out of its graphs.
    """

    def __init__(self, *, in_place: bool = False, **settings: Any) -> None:
        super().__init__()
        if "grad" in settings:
            raise TypeError(
                "grad is made by EntropyLoss: choose between a new tensor and the logits' memory by in_place"
            )
        _refuse_unknown("EntropyLoss", settings, _ENTROPY_SETTINGS)
        self.in_place = in_place
        self.settings = settings

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the loss, an fp32 scalar, or (rows,) with reduction="none".

        logits: (rows, local vocab). target: as for `entropy_loss`.
        """
        if torch.compiler.is_compiling():
            from tpbench.kernels.eager import eager

            result: Tensor = eager(self._forward, logits, target)
            return result
        return self._forward(logits, target)

    def _forward(self, logits: Tensor, target: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and logits.requires_grad):
            return entropy_loss(logits, target, grad="none", **self.settings).loss
        apply: Any = _EntropyLoss.apply
        result: Tensor = apply(logits, target, "in_place" if self.in_place else "new", self.settings)
        return result

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in {"in_place": self.in_place, **self.settings}.items())


class _EntropyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, grad: Any, settings: dict[str, Any]) -> Tensor:
        ctx.stored_scale = _stored_scale(logits, settings)
        if ctx.stored_scale != 1.0:
            settings = {**settings, "grad_scale": settings.get("grad_scale", 1.0) * ctx.stored_scale}
        result = entropy_loss(logits, target, grad=grad, **settings)
        ctx.grad = result.grad
        return result.loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.grad is None:
            raise RuntimeError("EntropyLoss keeps one gradient and gave it to an earlier backward: run forward again")
        grad, ctx.grad = ctx.grad, None
        if ctx.stored_scale != 1.0:
            upstream = upstream / ctx.stored_scale
        return scale_rows(grad, upstream.contiguous()), None, None, None


def _stored_scale(logits: Tensor, settings: dict[str, Any]) -> float:
    """Return the factor on the gradient between forward and backward (see `fp16_gradient_scale`)."""
    if logits.dtype != torch.float16 or settings.get("reduction", "mean") != "mean":
        return 1.0
    checks.matrix("logits", logits)
    factors = {name: settings.get(name, 1.0) for name in ("grad_scale", "logits_scale")}
    for name, factor in factors.items():
        checks.number(name, factor, low=-math.inf)
    return fp16_gradient_scale(len(logits), *factors.values())


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
        _refuse_unknown("LinearEntropyLoss", settings, _LINEAR_SETTINGS)
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
        tensors = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
        if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
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
