"""The derivatives of both modules: gradients that forward computes, or that backward does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.utils._pytree import GetAttrKey, register_pytree_node, tree_flatten, tree_unflatten

from tpbench.kernels import checks
from tpbench.kernels.linear.function import LinearEntropyLossResult, linear_entropy_loss
from tpbench.kernels.row_loss import TopK
from tpbench.kernels.two_pass.launch import scale_rows

Function = TypeVar("Function", bound=Callable[..., Any])
register_pytree_node(
    TopK,
    lambda top: ([top.values, top.indices], top.tail),
    lambda of, tail: TopK(*of, tail),  # type: ignore[call-arg]
    flatten_with_keys_fn=lambda top: (
        [(GetAttrKey(name), getattr(top, name)) for name in ("values", "indices")],
        top.tail,
    ),
)


def outside_of_graphs(function: Function) -> Function:
    """Return the function, which runs as uncompiled code also within torch.compile."""
    # torch.compiler.disable would import the compiler now, which takes seconds.
    uncompiled = _disable_dynamo(function)

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        return (uncompiled if torch.compiler.is_compiling() else function)(*arguments, **named)

    return cast("Function", call)


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
        ctx: Any, keep: Callable[..., Any], others: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Any:
        """`keep` receives the result. `others`: the target, and the other arguments of the function by name."""
        # Autograd then raises an error if a tensor is changed before backward.
        leaves, ctx.tree = tree_flatten(others)
        tensors = [leaf if isinstance(leaf, Tensor) else None for leaf in leaves]
        ctx.save_for_backward(hidden, weight, bias, *tensors)
        ctx.leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        target, named = others
        result = result_of(False, target, named, hidden, weight, bias)
        keep(result)
        ctx.rows = len(result.row_loss)
        return (result.loss, result.entropy) if named.get("entropy") else result.loss

    @staticmethod
    @outside_of_graphs
    def backward(ctx: Any, upstream: Tensor, *entropy_upstream: Tensor) -> tuple[Tensor | None, ...]:
        checks.first_derivative()
        hidden, weight, bias, *tensors = ctx.saved_tensors
        leaves = [leaf if tensor is None else tensor for leaf, tensor in zip(ctx.leaves, tensors, strict=True)]
        target, named = tree_unflatten(leaves, ctx.tree)
        named["row_grad"] = upstream.float().expand(ctx.rows).contiguous()
        if entropy_upstream:
            named["entropy_grad"] = entropy_upstream[0].float().contiguous()
        result = result_of(True, target, named, hidden, weight, bias)
        return None, None, result.grad_hidden, result.grad_weight, result.grad_bias


def result_of(
    learns: bool, target: Any, named: dict[str, Any], hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> LinearEntropyLossResult:
    """Return the result of `linear_entropy_loss`, with the gradients of the inputs that need one if it learns."""
    inputs = zip(checks.LINEAR_INPUTS, (hidden, weight, bias), strict=True)
    grad: Any = [name for name, tensor in inputs if learns and tensor is not None and tensor.requires_grad]
    return linear_entropy_loss(hidden, weight, target, bias=bias, grad=grad, **named)
