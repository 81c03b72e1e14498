"""The derivatives of both modules: gradients that forward computes, or that backward does."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_flatten, tree_unflatten

from tpbench.kernels import checks
from tpbench.kernels.linear.function import linear_entropy_loss
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


class GradientsInForward(torch.autograd.Function):
    """A loss whose forward computes the gradients of its inputs, and whose backward scales them in place."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[[], Any], stored_scale: float, *inputs: Any) -> Tensor:
        """`compute` returns the loss and the gradients of the inputs. stored_scale: the factor that these contain."""
        loss: Tensor
        (loss, ctx.gradients), ctx.stored_scale = compute(), stored_scale
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
        return (None, None, *gradients)


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
