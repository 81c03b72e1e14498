"""The matrix products of the linear loss, which write into memory that exists."""

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
