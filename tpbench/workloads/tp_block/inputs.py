"""Activations and weights of a problem: hashes of their global indices.

Each rank computes its part alone. All parts together are the same whole at any world size, bit for bit.
"""

import math
from functools import cached_property

import torch
from torch import Tensor

from tpbench.comm.symmetric_buffers import SymmetricBuffers
from tpbench.measure.session import Context
from tpbench.workloads.hashing import NORMAL_DEVIATION, fill_normal
from tpbench.workloads.tp_block.problem import ShardedLinear, TpBlock, equal_share

_X, _GRAD, _NORM, _WEIGHT, _TARGET = 60, 62, 64, 70, 80
"""Random streams of a seed for row indices. The next stream is for column indices."""

_LAYER = 100
"""Distance between the streams of two layers' weights."""


class BlockInputs:
    """This rank's inputs: its part of each weight, its shard of x and of the upstream gradient."""

    def __init__(self, problem: TpBlock, context: Context) -> None:
        self.context = context
        self.problem, self.device, self.dtype = problem, context.device, getattr(torch, problem.dtype)
        self.rank, self.size, self.group = context.tp_rank, context.tp_size, context.tp_group
        self.activation_seed = problem.seed
        """Seed of x and the upstream gradient. The weights always have the problem's."""

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """This rank's part of each weight, by name, in the problem's dtype."""
        return self.weights_of(self.rank, self.size)

    def weights_of(self, rank: int, size: int, layer: int = 0) -> dict[str, Tensor]:
        """Return the parts of one of `size` ranks, of a layer of the stack."""
        start = _LAYER * layer
        norms = {name: self._norm(start + 2 * index) for index, name in enumerate(self.problem.norms)}
        return norms | {
            linear.name: self._weight(start + 2 * index, linear, rank, size)
            for index, linear in enumerate(self.problem.linears)
        }

    def symmetric_buffers(self) -> SymmetricBuffers:
        """Return new buffers that this rank shares with its peers. Collective."""
        return SymmetricBuffers(self.group, self.device, self.problem.signals)

    def x(self, rank: int, size: int) -> Tensor:
        """Return one of `size` ranks' rows of the input (tokens, hidden), for part=row columns of (tokens, ffn)."""
        linear = self.problem.linears[0]
        if linear.kind == "row":
            return self._matrix(_X, range(self.problem.tokens), linear.columns(rank, size), -1)
        return self._matrix(_X, self._rows(rank, size), range(linear.in_features), -1)

    def grad(self, rank: int, size: int) -> Tensor:
        """Return one of `size` ranks' shard of the upstream gradient, scaled for a loss <grad, output> of order 1."""
        linear = self.problem.linears[-1]
        width = sum(linear.out_features)
        exponent = -_nearest_power(NORMAL_DEVIATION * math.sqrt(self.problem.tokens * width))
        if linear.kind == "column":
            (columns,) = linear.rows(rank, size)
            return self._matrix(_GRAD, range(self.problem.tokens), columns, exponent)
        return self._matrix(_GRAD, self._rows(rank, size), range(width), exponent)

    def target(self, rank: int, size: int) -> Tensor:
        """Return one of `size` ranks' shard of the output that a stack is trained to have."""
        return self._matrix(_TARGET, self._rows(rank, size), range(self.problem.hidden), -1)

    def _norm(self, stream: int) -> Tensor:
        """An RMSNorm's weight (hidden,), about 1."""
        numbers = torch.empty(1, self.problem.hidden, device=self.device)
        fill_normal(numbers, self.problem.seed, _NORM + stream, 2.0**-4)
        return (1 + numbers[0]).to(self.dtype)

    def _rows(self, rank: int, size: int) -> range:
        return equal_share(range(self.problem.tokens), rank, size)

    def _weight(self, stream: int, linear: ShardedLinear, rank: int, size: int) -> Tensor:
        exponent = -_nearest_power(NORMAL_DEVIATION * math.sqrt(linear.in_features))
        columns = linear.columns(rank, size)
        return torch.cat([self._matrix(_WEIGHT + stream, rows, columns, exponent) for rows in linear.rows(rank, size)])

    def _matrix(self, stream: int, rows: range, columns: range, exponent: int) -> Tensor:
        """(rows, columns) in the problem's dtype: normal numbers times 2^exponent."""
        matrix = torch.empty(len(rows), len(columns), dtype=self.dtype, device=self.device)
        seed = self.activation_seed if stream in (_X, _GRAD) else self.problem.seed
        fill_normal(matrix, seed, stream, 2.0**exponent, (rows.start, columns.start))
        return matrix


def _nearest_power(value: float) -> int:
    """The exponent of the nearest power of two: scaling by a power of two is exact."""
    return round(math.log2(value))
