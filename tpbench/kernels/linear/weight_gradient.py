"""The gradients of the head's weight and bias, to which each chunk of rows adds its part."""

from __future__ import annotations

import torch
from torch import Tensor

from tpbench.kernels.linear.products import Accumulation, add_product, multiply


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
