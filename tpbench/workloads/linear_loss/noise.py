"""What rounding does to the gradients of a linear loss, as variances of the errors of their rows and columns.

Correct variants round logits to their dtype, so a probability's relative error is the absolute error of its logit. A
bound for the worst case would hide a lost row of the weight's gradient. But these errors are independent: those of many
columns average out, except the error of a row's sum of exponentials, which all of its probabilities share.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from tpbench.workloads.differences import Comparison, smallest

SIGMAS = 5.0
"""Errors of so many standard deviations are explained by rounding."""

TILE = 64
"""Rows whose gain, the factor by which a result is too large, is judged together."""

ARITHMETIC = 2.0**-17
"""Relative error of a probability by arithmetic in fp32."""

PRODUCTS = 2.0**-21
"""Error of a logit by a product in fp32, over the square root of its terms: a sum near 8 is rounded as often."""

SUMS = 2.0**-18
"""Relative error of sums in fp32 of 10^5 terms, as a standard deviation. On a GPU, 2^-19 was seen for 65536 terms."""


class LogitNoise(NamedTuple):
    """The errors of the logits' gradient of some rows, (rows, columns)."""

    variance: Tensor  # of independent errors
    shared: Tensor  # the standard deviation of errors that all columns of a row share
    omitted: Tensor | None  # terms that a variant may leave out


@dataclass
class ProductNoise:
    """Variances of the errors of a product of the logits' gradient, summed over its rows and columns: of independent
    errors, of errors that don't average out, and the squares of sums that are rounded."""

    rows: Tensor  # (3, rows)
    columns: Tensor  # (3, columns)

    @classmethod
    def zeros(cls, product: Tensor) -> "ProductNoise":
        """Return that of an exact product."""
        return cls(*(product.new_zeros(3, length) for length in product.shape))

    def add(self, noise: LogitNoise, grad: Tensor, factor: Tensor, *, is_transposed: bool) -> None:
        """Add the noise of grad.t() @ factor if is_transposed, else of grad @ factor."""
        squares = factor.square()
        independent = {0: noise.variance, 2: grad.square()}
        sums = [] if noise.omitted is None else [noise.omitted]
        if is_transposed:  # the errors that a token's columns share are independent of those of other tokens
            independent[1] = noise.shared.square()
        else:
            sums.append(noise.shared)
        for part, variance in independent.items():
            variance = variance.t() if is_transposed else variance
            self.rows[part] += variance @ squares.sum(1)
            self.columns[part] += variance.sum(0) @ squares
        for errors in sums:
            square = ((errors.t() if is_transposed else errors) @ factor).square()
            self.rows[1] += square.sum(1)
            self.columns[1] += square.sum(0)

    def allowed(self, dim: int, right: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the norms of the errors of rows (dim=1) or columns (dim=0) that rounding explains."""
        unit, parts = max(torch.finfo(dtype).eps / 2, SUMS), self.rows if dim else self.columns
        variance = parts[0] + parts[1] + (parts[2] + right.square().sum(dim)) * unit**2
        return SIGMAS * variance.sqrt() + smallest(dtype) * math.sqrt(right.shape[dim])

    def judge(self, comparison: Comparison, name: str, got: Tensor, right: Tensor, dtype: torch.dtype) -> None:
        """Judge rows, columns and tiles of rows of a gradient, and all of it on this rank."""
        unit, least = max(torch.finfo(dtype).eps / 2, SUMS), smallest(dtype)
        for kind, dim in (("row", 1), ("column", 0)):
            error = (got - right).square().sum(dim).sqrt()
            comparison.groups(name, kind, error, self.allowed(dim, right, dtype))
        squares = right.square().sum(1)
        independent = (self.rows[0] + (self.rows[2] + squares) * unit**2 * 3 / right.shape[1]) * squares
        shared = (self.rows[1] * squares).sqrt()
        sums = torch.stack((squares, (got * right).sum(1), independent, shared, right.abs().sum(1)))
        for kind, size in (("tile of rows", TILE), ("the whole", max(1, len(right)))):
            tiles = functional.pad(sums, (0, -len(right) % size)).view(len(sums), -1, size).sum(2)
            whole, product, independent, shared, absolute = tiles
            allowed = (SIGMAS * (independent.sqrt() + shared) + least * absolute) / whole
            comparison.groups(
                name, kind, (product / whole - 1).where(whole > 0, 0.0), allowed.where(whole > 0, 0.0), what="the gain"
            )
