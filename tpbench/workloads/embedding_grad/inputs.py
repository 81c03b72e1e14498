"""Inputs of one rank: the rows that its tokens touched, and the gradient that its backward passes left."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tpbench.workloads.embedding_grad.problem import EmbeddingGrad
from tpbench.workloads.embedding_grad.tokens import RowPartition, token_rows
from tpbench.workloads.hashing import hash_index, normal

if TYPE_CHECKING:
    from tpbench.measure.session import Context


_ROWS, _COLUMNS = 49, 50
"""Streams of `hash_index`: independent numbers from one seed."""

CHUNK = {"cpu": 2**18, "cuda": 2**23}
"""Number of elements to compute or compare at once."""


class EmbeddingGradInputs:
    """A rank's gradient and tokens. It also knows the tokens of all ranks, for the oracle and the counts."""

    def __init__(self, problem: EmbeddingGrad, context: Context, tokens: Sequence[Tensor] | None = None) -> None:
        """Make the inputs from each rank's token rows, (accumulate, any) int32 on the CPU.

        Without `tokens` the problem's distribution gives these rows.
        """
        self.problem = problem
        self.partition = RowPartition(problem.table_rows, context.dp_size)
        self.rank, self.device, self.group = context.dp_rank, context.device, context.dp_group
        if tokens is None:
            tokens = [token_rows(problem, self.partition, rank) for rank in range(context.dp_size)]
        self.tokens = list(tokens)
        """Token rows of each rank, (accumulate, tokens) int32 on the CPU."""
        self.touched = [torch.unique(rows).long() for rows in self.tokens]
        """Distinct rows of each rank, sorted, int64 on the CPU."""
        dtype = getattr(torch, problem.dtype)
        self.grad = torch.zeros(self.partition.padded_rows, problem.width, dtype=dtype, device=self.device)
        """(padded rows, width): this rank's accumulated gradient, zero in rows without a token."""
        self.fill(self.grad)

    def fill(self, grad: Tensor) -> None:
        """Write this rank's gradient into the rows that it touched of (padded rows, width) zeros."""
        for rows in self.touched[self.rank].split(self._chunk):
            grad[rows.to(self.device)] = self.gradient_rows(self.rank, rows)

    @property
    def own_tokens(self) -> Tensor:
        """(accumulate, tokens) int32 on the CPU: the rows of this rank's tokens."""
        return self.tokens[self.rank]

    @property
    def own_slice(self) -> Tensor:
        """(rows_per_rank, width): the part of the gradient that this rank owns."""
        return self.slice_of(self.grad)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the gradient."""
        return self.grad.shape[1] * self.grad.element_size()

    @property
    def _chunk(self) -> int:
        return max(1, CHUNK[self.device.type] // self.problem.width)

    def slice_of(self, table: Tensor) -> Tensor:
        """Return this rank's rows of a padded table."""
        return table.narrow(0, self.partition.first_row(self.rank), self.partition.rows_per_rank)

    def gradient_rows(self, rank: int, rows: Tensor) -> Tensor:
        """Return a rank's gradient in rows that it touched, (len(rows), width) in the problem's dtype.

        The values are the same on every rank and device.
        """
        problem, rows = self.problem, rows.to(self.device)
        columns = torch.arange(problem.width, device=self.device)
        row_hash = hash_index(problem.seed, _ROWS, rows + rank * problem.table_rows)
        return normal(row_hash, hash_index(problem.seed, _COLUMNS, columns)).to(self.grad.dtype)

    @cached_property
    def counts(self) -> list[list[int]]:
        """Number of touched rows, by the rank that touched them and then the rank that owns them."""
        bounds = torch.tensor(self.partition.bounds)
        return [torch.searchsorted(rows, bounds).diff().tolist() for rows in self.touched]

    @cached_property
    def merged_rows(self) -> list[int]:
        """For each owner, the number of its rows that at least one rank touched."""
        union = torch.unique(torch.cat(self.touched))
        counts: list[int] = torch.searchsorted(union, torch.tensor(self.partition.bounds)).diff().tolist()
        return counts

    @property
    def density(self) -> float:
        """Touched rows over the table's rows, mean over ranks."""
        return sum(map(len, self.touched)) / (len(self.touched) * self.problem.table_rows)

    @property
    def duplicate_rate(self) -> float:
        """Share of tokens whose row another token of the rank has already touched, over all ranks."""
        tokens = sum(rows.numel() for rows in self.tokens)
        return 1.0 - sum(map(len, self.touched)) / tokens if tokens else 0.0
