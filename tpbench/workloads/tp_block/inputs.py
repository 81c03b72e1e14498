"""Activations and weights of a problem: hashes of their global indices, so that a rank makes its part alone and all
parts together are the same whole at any world size, bit for bit."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tpbench.workloads.hashing import hash_index, normal
from tpbench.workloads.tp_block.problem import TpBlock

if TYPE_CHECKING:
    from tpbench.measure.session import Context
    from tpbench.workloads.tp_block.sharded_linear import ShardedLinear

_X, _GRAD, _NORM, _WEIGHT = 60, 62, 64, 70
"""Streams of a seed: each row stream has the next one for its columns."""

_DEVIATION = 2.31
"""Of `normal`."""

CHUNK = 2**24
"""Elements made at once."""


class BlockInputs:
    """What a rank is given: its shard of x and of the gradient by the output, and its part of each weight."""

    def __init__(self, problem: TpBlock, context: Context) -> None:
        self.problem, self.device, self.dtype = problem, context.device, getattr(torch, problem.dtype)
        self.rank, self.size, self.group = context.tp_rank, context.tp_size, context.tp_group

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """This rank's part of each weight, by name, in the problem's dtype."""
        return self.weights_of(self.rank, self.size)

    def weights_of(self, rank: int, size: int) -> dict[str, Tensor]:
        """One of `size` ranks' parts."""
        made = {name: self.norm(index) for index, name in enumerate(self.problem.norms)}
        return made | {
            each.name: self._weight(index, each, rank, size) for index, each in enumerate(self.problem.linears)
        }

    def x(self, rank: int, size: int) -> Tensor:
        """One of `size` ranks' shard of the input: rows of (tokens, hidden), of the row-parallel linear columns of
        (tokens, ffn)."""
        linear = self.problem.linears[0]
        if linear.kind == "row":
            return self._matrix(_X, range(self.problem.tokens), linear.columns(rank, size), -1)
        return self._matrix(_X, self._rows(rank, size), range(linear.in_features), -1)

    def grad(self, rank: int, size: int) -> Tensor:
        """The same of the gradient by the output, scaled such that the loss <grad, output> is of the order of 1."""
        linear = self.problem.linears[-1]
        width = sum(linear.out_features)
        exponent = -_power(_DEVIATION * math.sqrt(self.problem.tokens * width))
        if linear.kind == "column":
            (columns,) = linear.rows(rank, size)
            return self._matrix(_GRAD, range(self.problem.tokens), columns, exponent)
        return self._matrix(_GRAD, self._rows(rank, size), range(width), exponent)

    def norm(self, index: int) -> Tensor:
        """(hidden,): an RMSNorm's weight, about 1."""
        return (1 + self._made(_NORM + 2 * index, range(1), range(self.problem.hidden), -4)[0]).to(self.dtype)

    def _rows(self, rank: int, size: int) -> range:
        each = self.problem.tokens // size
        return range(rank * each, (rank + 1) * each)

    def _weight(self, index: int, linear: ShardedLinear, rank: int, size: int) -> Tensor:
        exponent = -_power(_DEVIATION * math.sqrt(linear.in_features))
        columns = linear.columns(rank, size)
        return torch.cat(
            [self._matrix(_WEIGHT + 2 * index, rows, columns, exponent) for rows in linear.rows(rank, size)]
        )

    def _matrix(self, stream: int, rows: range, columns: range, exponent: int) -> Tensor:
        """(rows, columns) in the problem's dtype: normal numbers times 2^exponent."""
        made = torch.empty(len(rows), len(columns), dtype=self.dtype, device=self.device)
        step = max(1, CHUNK // len(columns))
        for start in range(0, len(rows), step):
            made[start : start + step] = self._made(stream, rows[start : start + step], columns, exponent)
        return made

    def _made(self, stream: int, rows: range, columns: range, exponent: int) -> Tensor:
        index = [torch.arange(each.start, each.stop, device=self.device) for each in (rows, columns)]
        hashes = [hash_index(self.problem.seed, stream + at, each) for at, each in enumerate(index)]
        return normal(*hashes).mul_(2.0**exponent)


def _power(value: float) -> int:
    """The power of two next to a value: scaling by it is exact."""
    return round(math.log2(value))
