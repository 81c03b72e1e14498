"""What rounding does to the gradients of a linear loss, as variances of the errors of their rows and columns.

Correct variants round logits to their dtype, so a probability's relative error is the absolute error of its logit. A
bound for the worst case would hide a lost row of the weight's gradient. But these errors are independent of each other:
their sums have known variances, and those of many columns average out. What does not average out is the error of a
row's sum of exponentials, which all of its probabilities share.
"""

import math
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from tpbench.workloads.differences import Comparison, smallest

SIGMAS = 5.0
"""Errors of so many standard deviations are explained by rounding."""

TILE = 64
"""Rows whose gain is judged together. A gain is the factor by which a result is too large."""

ARITHMETIC = 2.0**-17
"""Relative error of a probability by arithmetic in fp32."""


SUMS = 2.0**-18
"""Relative error of sums in fp32 of 10^5 terms, as a standard deviation. On a GPU, 2^-19 was seen for 65536 terms."""


@dataclass
class LogitNoise:
    """The errors of the logits' gradient of some rows."""

    variance: Tensor
    """(rows, columns): of independent errors."""
    shared: Tensor
    """(rows, columns): the standard deviation of errors that all columns of a row share."""
    omitted: Tensor | None
    """(rows, columns): terms that a variant may leave out."""


def logit_noise(
    grad: Tensor, independent: Tensor, shared: Tensor, omitted: Tensor | None, dtype: torch.dtype, scale: float
) -> LogitNoise:
    """Return the errors of the logits' gradient, (rows, columns), which is rounded to a dtype.

    independent, shared: the standard deviations of its errors before that rounding. scale: the largest factor on it
    after a rounding.
    """
    underflow, eps = scale * smallest(dtype), torch.finfo(dtype).eps
    variance = independent.square_().add_((grad * eps).square_().div_(12)).add_(underflow**2 / 4)
    return LogitNoise(variance, shared.add_(underflow / 2), omitted)


@dataclass
class ProductNoise:
    """Variances of the errors of a product of the logits' gradient, summed over each row and over each column."""

    rows: Tensor
    columns: Tensor
    shared_rows: Tensor
    """Of errors that do not average out over rows."""
    shared_columns: Tensor
    rounded_rows: Tensor
    """The squares of partial sums that are rounded."""
    rounded_columns: Tensor

    @classmethod
    def zeros(cls, product: Tensor) -> "ProductNoise":
        """Return that of an exact product."""
        return cls(*(product.new_zeros(length) for _ in range(3) for length in product.shape))

    def add(self, noise: LogitNoise, grad: Tensor, factor: Tensor, *, is_transposed: bool) -> None:
        """Add the noise of grad.t() @ factor if is_transposed, else of grad @ factor."""
        squares = factor.square()

        def add(rows: Tensor, columns: Tensor, variance: Tensor) -> None:
            variance = variance.t() if is_transposed else variance
            rows += variance @ squares.sum(1)
            columns += variance.sum(0) @ squares

        add(self.rows, self.columns, noise.variance)
        add(self.rounded_rows, self.rounded_columns, grad.square())
        if is_transposed:  # the errors that a token's columns share are independent of those of other tokens
            add(self.shared_rows, self.shared_columns, noise.shared.square())
        else:
            self._add_shared(noise.shared @ factor)
        if noise.omitted is not None:
            self._add_shared((noise.omitted.t() if is_transposed else noise.omitted) @ factor)

    def _add_shared(self, errors: Tensor) -> None:
        self.shared_rows += errors.square().sum(1)
        self.shared_columns += errors.square().sum(0)

    def part(self, rows: slice) -> "ProductNoise":
        """Return that of some rows, which adds to the sums over columns of all."""
        of_rows = {name: getattr(self, name)[rows] for name in ("rows", "shared_rows", "rounded_rows")}
        return replace(self, **of_rows)

    def tensors(self) -> list[Tensor]:
        """Return the tensors, to sum them over ranks in place."""
        return [getattr(self, field.name) for field in fields(self)]

    def judge(self, comparison: Comparison, name: str, got: Tensor, right: Tensor, dtype: torch.dtype) -> None:
        """Judge rows, columns and tiles of rows of a gradient, and all of it on this rank."""
        unit, least = max(torch.finfo(dtype).eps / 2, SUMS), smallest(dtype)
        square = right.square()
        error = (got - right).square()

        def allowed(variance: Tensor, shared: Tensor, rounded: Tensor, dim: int) -> Tensor:
            of_sums = (rounded + square.sum(dim)) * unit**2
            return SIGMAS * (variance + shared + of_sums).sqrt() + least * math.sqrt(right.shape[dim])

        rows = allowed(self.rows, self.shared_rows, self.rounded_rows, 1)
        comparison.groups(name, "row", error.sum(1).sqrt(), rows)
        columns = allowed(self.columns, self.shared_columns, self.rounded_columns, 0)
        comparison.groups(name, "column", error.sum(0).sqrt(), columns)

        squares = square.sum(1)
        of_sums = (self.rounded_rows + squares) * unit**2 * 3 / right.shape[1]
        independent, shared = (self.rows + of_sums) * squares, (self.shared_rows * squares).sqrt()
        for kind, size in (("tile of rows", TILE), ("the whole", max(1, len(right)))):

            def tiles(values: Tensor, size: int = size) -> Tensor:
                values = torch.nn.functional.pad(values, (0, -len(values) % size))
                return values.view(-1, size).sum(1)

            whole = tiles(squares)
            gain = torch.where(whole > 0, tiles((got * right).sum(1)) / whole - 1, 0.0)
            noise = SIGMAS * tiles(independent).sqrt() + SIGMAS * tiles(shared)
            noise += least * tiles(right.abs().sum(1))
            comparison.groups(name, kind, gain, torch.where(whole > 0, noise / whole, 0.0), what="the gain")
