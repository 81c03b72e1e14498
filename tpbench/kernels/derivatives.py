"""The derivatives of both modules: gradients that forward computes, or backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_flatten, tree_unflatten

from tpbench.kernels import checks
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
    def forward(ctx: Any, compute: Callable[[], Any], *inputs: Any) -> Any:
        """`compute` returns the loss, the gradients of the inputs, and the factor that these contain."""
        loss, ctx.gradients, ctx.stored_scale = compute()
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
    """A loss whose backward, if it comes, computes it again, and the gradients of its inputs."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Any], kept: Callable[..., Any], others: Any, *inputs: Any) -> Any:
        """`others`: the target, and the other arguments of the loss by name. `kept` receives the result.

        `compute` gets the inputs, the others, and whether the gradient of each input is wanted. It returns the result
        and these gradients.
        """
        # Autograd then raises an error if a tensor is changed before backward.
        leaves, ctx.tree = tree_flatten((inputs, *others))
        ctx.save_for_backward(*[leaf if isinstance(leaf, Tensor) else None for leaf in leaves])
        ctx.leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        ctx.compute = compute
        result = kept(compute(inputs, *others, [False] * len(inputs))[0])
        ctx.rows = len(result.row_loss)
        return (result.loss, result.entropy) if others[1].get("entropy") else result.loss

    @staticmethod
    @outside_of_graphs
    def backward(ctx: Any, upstream: Tensor, *entropy_upstream: Tensor) -> tuple[Tensor | None, ...]:
        checks.first_derivative()
        saved = zip(ctx.leaves, ctx.saved_tensors, strict=True)
        leaves = [leaf if tensor is None else tensor for leaf, tensor in saved]
        inputs, target, named = tree_unflatten(leaves, ctx.tree)
        named["row_grad"] = upstream.float().expand(ctx.rows).contiguous()
        if entropy_upstream:
            named["entropy_grad"] = entropy_upstream[0].float().contiguous()
        return None, None, None, *ctx.compute(inputs, target, named, ctx.needs_input_grad[3:])[1]
