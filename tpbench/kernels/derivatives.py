"""The derivatives of both modules: gradients that forward computes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

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
