"""The derivatives of both modules: gradients that forward computes, or that backward does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from tpbench.kernels import checks
from tpbench.kernels.linear.function import linear_entropy_loss
from tpbench.kernels.row_loss import TopK
from tpbench.kernels.two_pass.launch import scale_rows

Function = TypeVar("Function", bound=Callable[..., Any])


def outside_of_graphs(function: Function) -> Function:
    """Return the function, which runs as uncompiled code also within torch.compile."""
    # torch.compiler.disable would import the compiler now, which takes seconds.
    uncompiled = _disable_dynamo(function)

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        return (uncompiled if torch.compiler.is_compiling() else function)(*arguments, **named)

    return cast("Function", call)


def tensors_of(target: Any) -> dict[str, Any]:
    """Return the tensors of a target by name."""
    if isinstance(target, TopK):
        return {"target.values": target.values, "target.indices": target.indices}
    if isinstance(target, (tuple, list)):
        return dict(zip(("teacher_hidden", "teacher_weight"), target, strict=False))
    return {"target": target}


def inputs_with_gradients(*inputs: Tensor | None) -> tuple[Any, ...]:
    """Return the names of the inputs of a linear loss that need a gradient."""
    named = zip(checks.LINEAR_INPUTS, inputs, strict=True)
    return tuple(name for name, tensor in named if tensor is not None and tensor.requires_grad)


class GradientsInForward(torch.autograd.Function):
    """A loss whose forward computes the gradients of its inputs, and whose backward scales them in place."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Any], *inputs: Any) -> Tensor:
        """`compute` returns the loss, the gradient of each input, and the factor that the gradients contain."""
        loss: Tensor
        loss, ctx.gradients, ctx.stored_scale = compute(*inputs)
        return loss

    @staticmethod
    @outside_of_graphs
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        checks.first_derivative()
        if ctx.gradients is None:
            raise RuntimeError("this loss keeps one gradient and gave it to an earlier backward: run forward again")
        gradients, ctx.gradients = ctx.gradients, None
        for gradient in gradients:
            if gradient is not None:
                scale_rows(gradient.view(1, -1) if gradient.dim() == 1 else gradient, upstream, ctx.stored_scale)
        return (None, *gradients)


class GradientsInBackward(torch.autograd.Function):
    """A linear loss whose backward computes the logits again, and the gradients from them."""

    @staticmethod
    def forward(
        ctx: Any,
        module: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Any,
        *rows: Any,
    ) -> Any:
        """`rows`: the names of a call's further arguments, then their values."""
        named = dict(zip(rows[: len(rows) // 2], rows[len(rows) // 2 :], strict=True))
        ctx.module, ctx.settings, ctx.given = module, module.settings, len(rows)
        ctx.tail = target.tail if isinstance(target, TopK) else None
        targets = list(tensors_of(target).values())
        ctx.targets = len(targets)
        # Autograd then raises an error if one of them is changed before backward.
        tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
        ctx.of_rows, ctx.others = list(tensors), {name: named[name] for name in named.keys() - tensors.keys()}
        ctx.save_for_backward(hidden, weight, bias, *targets, *tensors.values())
        return module.losses(hidden, weight, bias, target, named)

    @staticmethod
    @outside_of_graphs
    def backward(ctx: Any, upstream: Tensor, *entropy_upstream: Tensor) -> tuple[Tensor | None, ...]:
        checks.first_derivative()
        hidden, weight, bias, *others = ctx.saved_tensors
        targets, of_rows = others[: ctx.targets], others[ctx.targets :]
        rows_of_call = {**ctx.others, **dict(zip(ctx.of_rows, of_rows, strict=True))}
        settings = ctx.module.arguments(rows_of_call, ctx.settings)
        sharded = settings.get("hidden_sharded") and settings.get("group") is not None
        target: Any = targets[0] if len(targets) == 1 else tuple(targets)
        if ctx.tail is not None:
            target = TopK(targets[0], targets[1], ctx.tail)
        rows = len(hidden) * (settings["group"].size() if sharded else 1)
        upstreams: dict[str, Any] = {"row_grad": upstream.float().expand(rows).contiguous()}
        if entropy_upstream:
            upstreams["entropy_grad"] = entropy_upstream[0].float().contiguous()
        inputs = inputs_with_gradients(hidden, weight, bias)
        result = linear_entropy_loss(hidden, weight, target, bias=bias, grad=inputs, **upstreams, **settings)
        return None, result.grad_hidden, result.grad_weight, result.grad_bias, *(None,) * (1 + ctx.given)
