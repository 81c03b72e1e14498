"""The matrix products of the linear loss, which write into memory that exists, and the weight's gradient."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Accumulation = Literal["product", "blocks"]
"""How a product is added to fp32 memory: inside the product, or in blocks of rows that are converted before."""

_BLOCK_ELEMENTS = 2**24
"""Elements of a block that is converted to fp32."""


def multiply(left: Tensor, right: Tensor, out: Tensor, alpha: float = 1.0) -> None:
    """Store alpha * left @ right in `out`. The product is rounded once, after the factor."""
    if alpha == 1.0:
        torch.mm(left, right, out=out)
    else:
        torch.addmm(out, left, right, beta=0, alpha=alpha, out=out)


def add_product(left: Tensor, right: Tensor, out: Tensor, alpha: float = 1.0) -> Accumulation:
    """Add alpha * left @ right to `out`, whose dtype is that of the factors or fp32. The sum is rounded once.

    torch adds to fp32 inside the product on CUDA devices only (out_dtype of torch.addmm, torch 2.11 to 2.13).
    Elsewhere blocks of rows are converted to fp32 first, which needs memory for one block.
    """
    if out.dtype == left.dtype:
        torch.addmm(out, left, right, alpha=alpha, out=out)
        return "product"
    if out.is_cuda and out.is_contiguous():
        torch.addmm(out, left, right, alpha=alpha, out_dtype=out.dtype, out=out)
        return "product"
    rows = max(1, _BLOCK_ELEMENTS // max(1, left.shape[1], out.shape[1]))
    converted = right.to(out.dtype)
    for first in range(0, len(out), rows):
        block = out[first : first + rows]
        block.addmm_(left[first : first + rows].to(out.dtype), converted, alpha=alpha)
    return "blocks"


def compute_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Store hidden @ weight.T + bias in `out`."""
    if bias is None:
        multiply(hidden, weight.t(), out)
    else:
        torch.addmm(bias, hidden, weight.t(), out=out)


class WeightGradient:
    """The gradients of weight and bias, summed over chunks. The bias's sum is kept in fp32."""

    def __init__(self, weight: Tensor, bias: Tensor | None, given: Tensor | None, chunks: int) -> None:
        """`given`: the tensor to add the weight's gradient to. None: the gradient gets new memory."""
        self.is_empty = given is None
        """True if the memory of `weight` is not yet defined."""
        empty = torch.empty if chunks else torch.zeros
        self.weight = empty(weight.shape, dtype=weight.dtype, device=weight.device) if given is None else given
        self.accumulation: Accumulation | None = None
        self._bias = bias
        self._bias_sum = None if bias is None else torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)

    def add(self, grad_logits: Tensor, hidden: Tensor, factor: float) -> None:
        """Add factor * grad_logits.T @ hidden. grad_logits: (rows, local vocab), hidden: (rows, h)."""
        if self.is_empty:
            multiply(grad_logits.t(), hidden, self.weight, factor)
            self.is_empty, self.accumulation = False, "product"
        else:
            self.accumulation = add_product(grad_logits.t(), hidden, self.weight, factor)
        if self._bias_sum is not None:
            self._bias_sum.add_(grad_logits.sum(0, dtype=torch.float32), alpha=factor)

    @property
    def bias(self) -> Tensor | None:
        """The bias's gradient in the bias's dtype, (local vocab,). None without a bias."""
        return None if self._bias is None or self._bias_sum is None else self._bias_sum.to(self._bias.dtype)
