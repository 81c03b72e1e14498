"""One rank's part of the problem: which rows its tokens touched, and the gradient that its backward passes left."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tpbench.workloads.embedding_grad.distributions import token_rows
from tpbench.workloads.embedding_grad.owners import Owners
from tpbench.workloads.embedding_grad.problem import EmbeddingGrad
from tpbench.workloads.hashing import hash_index, normal

if TYPE_CHECKING:
    from tpbench.measure.session import Context

_ROWS, _COLUMNS = 49, 50
"""Streams: independent numbers from one seed."""

CHUNK = {"cpu": 2**18, "cuda": 2**23}
"""Elements made or compared at once."""


class Inputs:
    """A rank's gradient and tokens. It knows every rank's tokens: the oracle and the counts are made of them."""

    def __init__(self, problem: EmbeddingGrad, context: Context, tokens: Sequence[Tensor] | None = None) -> None:
        """`tokens`: each rank's token rows, (accumulate, any) int32 on the CPU, in place of the distribution's."""
        self.problem = problem
        self.owners = Owners(problem.table_rows, context.dp_size)
        self.rank, self.device, self.group = context.dp_rank, context.device, context.dp_group
        ranks = range(context.dp_size)
        self.tokens = list(tokens) if tokens is not None else [token_rows(problem, self.owners, each) for each in ranks]
        self.touched = [torch.unique(each).long() for each in self.tokens]
        """Each rank's distinct rows, sorted, int64 on the CPU."""
        dtype = getattr(torch, problem.dtype)
        self.grad = torch.zeros(self.owners.padded_rows, problem.width, dtype=dtype, device=self.device)
        """(padded rows, width): this rank's accumulated gradient, zero where no token fell."""
        for rows in self.touched[self.rank].split(self._chunk):
            self.grad[rows.to(self.device)] = self.values(self.rank, rows)

    @property
    def steps(self) -> Tensor:
        """(accumulate, tokens) int32 on the CPU: the rows of this rank's tokens."""
        return self.tokens[self.rank]

    @property
    def own(self) -> Tensor:
        """(rows_each, width): the part of the gradient that this rank owns."""
        return self.slice_of(self.grad)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the gradient."""
        return self.grad.shape[1] * self.grad.element_size()

    @property
    def _chunk(self) -> int:
        return max(1, CHUNK[self.device.type] // self.problem.width)

    def slice_of(self, table: Tensor) -> Tensor:
        """This rank's rows of a padded table."""
        return table.narrow(0, self.owners.first(self.rank), self.owners.rows_each)

    def values(self, rank: int, rows: Tensor) -> Tensor:
        """(len(rows), width) in the problem's dtype: a rank's gradient in rows that it touched, the same everywhere."""
        problem, rows = self.problem, rows.to(self.device)
        columns = torch.arange(problem.width, device=self.device)
        made = normal(
            hash_index(problem.seed, _ROWS, rows + rank * problem.table_rows),
            hash_index(problem.seed, _COLUMNS, columns),
        )
        return made.to(self.grad.dtype)

    @cached_property
    def counts(self) -> list[list[int]]:
        """Touched rows by the rank that touched them and the rank that owns them."""
        bounds = torch.tensor(self.owners.bounds)
        return [torch.searchsorted(each, bounds).diff().tolist() for each in self.touched]

    @cached_property
    def merged_rows(self) -> list[int]:
        """For each owner, how many of its rows anybody touched."""
        union = torch.unique(torch.cat(self.touched))
        found: list[int] = torch.searchsorted(union, torch.tensor(self.owners.bounds)).diff().tolist()
        return found

    @property
    def density(self) -> float:
        """Touched rows over the table's, mean over ranks."""
        return sum(map(len, self.touched)) / (len(self.touched) * self.problem.table_rows)

    @property
    def duplicate_rate(self) -> float:
        """Share of tokens whose row had one already, over all ranks."""
        tokens = sum(each.numel() for each in self.tokens)
        return 1.0 - sum(map(len, self.touched)) / tokens if tokens else 0.0
