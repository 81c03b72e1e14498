"""`EntropyLoss`: the entropy loss as a torch module."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tpbench.kernels.cached_launch import cached_launch
from tpbench.kernels.entropy import checks
from tpbench.kernels.entropy.function import entropy_loss
from tpbench.kernels.fp16_scale import fp16_gradient_scale
from tpbench.kernels.two_pass import kernels as two_pass_kernels
from tpbench.kernels.two_pass.launch import block_for, is_wide, launching, tile

_SETTINGS = {
    name for name, each in inspect.signature(entropy_loss).parameters.items() if each.kind is each.KEYWORD_ONLY
} - {"grad", "row_grad", "entropy_grad", "entropy"}


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
        unknown = sorted(settings.keys() - _SETTINGS)
        if unknown:
            raise TypeError(
                f"EntropyLoss has no setting {', '.join(unknown)}; there are {', '.join(sorted(_SETTINGS))}"
            )
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
    """Return the factor on the gradient between forward and backward (see `fp16_scale`)."""
    if logits.dtype != torch.float16 or settings.get("reduction", "mean") != "mean":
        return 1.0
    checks.matrix("logits", logits)
    factors = {name: settings.get(name, 1.0) for name in ("grad_scale", "logits_scale")}
    for name, factor in factors.items():
        checks.number(name, factor, low=-math.inf)
    return fp16_gradient_scale(len(logits), *factors.values())


def scale_rows(grad: Tensor, factor: Tensor) -> Tensor:
    """Multiply (rows, columns) by a factor, () or (rows,), in place. Rows whose factor is 1 are not written."""
    rows, columns = grad.shape
    if grad.numel():
        block = block_for(columns)
        shape = tile(rows, block)
        with launching(grad.device):
            scale = cached_launch(
                two_pass_kernels.scale_kernel, PER_ROW=factor.dim(), WIDE=is_wide(columns, block, grad), **shape
            )
            scale(-(-rows // shape["ROWS"]), (grad, factor), (rows, columns, *grad.stride()))
    return grad
