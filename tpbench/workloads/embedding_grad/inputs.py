"""Inputs of one rank: its tokens' rows, the rows' partition over owners, and the gradient of its backward passes.

A token's row is a function of (seed, rank, step, position), computed on the CPU. A rank's tokens do not depend on the
number of ranks.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from tpbench.measure.session import Context
from tpbench.workloads.embedding_grad.problem import EmbeddingGrad
from tpbench.workloads.hashing import CHUNK, hash_index, normal

_UNIFORM, _FIXED, _TEXT = 33, 36, 37
_ROWS, _COLUMNS = 49, 50
"""Streams of `hash_index`: independent numbers from one seed."""

VOCABULARY = 50257
"""Tokens of GPT-2's vocabulary, whose texts the speed record trains on."""


def token_rows(problem: EmbeddingGrad, rank: int) -> Tensor:
    """Return the rows of one rank's tokens, (accumulate, tokens) int32."""
    seed, size, position = problem.seed, problem.table_rows, torch.arange(problem.tokens_per_rank)
    if problem.distribution == "zipf_bigram":
        return bigram_rows(text_tokens(problem, rank), size)
    if problem.distribution == "fixed":
        # An arithmetic progression modulo the table, whose step has no common factor with the table's rows.
        start, step = map(int, hash_index(seed, _FIXED, torch.tensor([2 * rank, 2 * rank + 1])).tolist())
        step = step % size or 1
        while math.gcd(step, size) != 1:
            step += 1
        rows = (position * step + start) % size
    else:
        rows = (hash_index(seed, _UNIFORM, position + rank * problem.tokens_per_rank) * size) >> 32
    return rows.to(torch.int32).view(problem.accumulate, -1)


def text_tokens(problem: EmbeddingGrad, rank: int) -> Tensor:
    """Return the tokens of one rank's text under distribution=zipf_bigram, (accumulate, tokens) int32 on the CPU.

    Token k - 1 of the vocabulary has probability log(1 + 1/k) / log(1 + VOCABULARY): about 1/k, as in natural language.
    Real text has fewer distinct pairs, because neighbours depend on each other.
    """
    position = torch.arange(problem.tokens_per_rank) + rank * problem.tokens_per_rank
    hashed = hash_index(problem.seed, _TEXT, position)
    word = (hashed.double() / 2**32 * math.log(VOCABULARY + 1)).exp_().long().clamp_(1, VOCABULARY)
    return (word - 1).to(torch.int32).view(problem.accumulate, problem.tokens)


def bigram_rows(tokens: Tensor, table_rows: int, out: Tensor | None = None) -> Tensor:
    """Return the row of each of the `tokens`, (steps, tokens) int32, and the token before it, in `out` if given.

    The first token of a step has no token before it, and has the last row. Integers wrap, as int32 does on a GPU.
    """
    rows = torch.empty_like(tokens) if out is None else out
    mixed = (tokens[:, 1:] * 36313).bitwise_xor_(tokens[:, :-1] * 27191)
    torch.remainder(mixed, max(1, table_rows - 1), out=rows[:, 1:])
    rows[:, :1] = table_rows - 1
    return rows


class EmbeddingGradInputs:
    """A rank's gradient and tokens. It also knows the tokens of all ranks, for the oracle and the counts."""

    def __init__(self, problem: EmbeddingGrad, context: Context, tokens: Sequence[Tensor] | None = None) -> None:
        """`tokens`: each rank's rows, (accumulate, any) int32 on the CPU, by default of the problem's distribution."""
        self.problem = problem
        self.rank, self.device, self.group = context.dp_rank, context.device, context.dp_group
        self.world_size = context.dp_size
        self.rows_per_rank = -(-problem.table_rows // context.dp_size)
        """Consecutive rows of each rank. Padding at the table's end makes the shares equal."""
        self.bounds = [rank * self.rows_per_rank for rank in range(context.dp_size + 1)]
        """First row of each rank, then the number of rows of the padded table."""
        if tokens is None:
            tokens = [token_rows(problem, rank) for rank in range(context.dp_size)]
        self.tokens = list(tokens)
        """Token rows of each rank, (accumulate, tokens) int32 on the CPU."""
        self.touched = [torch.unique(rows).long() for rows in self.tokens]
        """Distinct rows of each rank, sorted, int64 on the CPU."""
        self.grad = self.with_seed(problem.seed)
        """(padded rows, width): this rank's accumulated gradient, zero in rows without a token."""

    def with_seed(self, seed: int) -> Tensor:
        """Change to the numbers of a seed in the same rows, also for the oracle, and return this rank's gradient."""
        self.problem = problem = replace(self.problem, seed=seed)
        dtype = getattr(torch, problem.dtype)
        grad = torch.zeros(self.bounds[-1], problem.width, dtype=dtype, device=self.device)
        for rows in self.touched[self.rank].split(max(1, CHUNK[self.device.type] // problem.width)):
            grad[rows.to(self.device)] = self.gradient_rows(self.rank, rows)
        return grad

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

    def slice_of(self, table: Tensor) -> Tensor:
        """Return this rank's rows of a padded table."""
        return table.narrow(0, self.bounds[self.rank], self.rows_per_rank)

    def gradient_rows(self, rank: int, rows: Tensor) -> Tensor:
        """Return a rank's gradient in rows that it touched, (len(rows), width), equal on every rank and device."""
        problem, rows = self.problem, rows.to(self.device)
        columns = torch.arange(problem.width, device=self.device)
        row_hash = hash_index(problem.seed, _ROWS, rows + rank * problem.table_rows)
        return normal(row_hash, hash_index(problem.seed, _COLUMNS, columns)).to(getattr(torch, problem.dtype))

    @cached_property
    def counts(self) -> list[list[int]]:
        """Number of touched rows, by the rank that touched them and then the rank that owns them."""
        bounds = torch.tensor(self.bounds)
        return [torch.searchsorted(rows, bounds).diff().tolist() for rows in self.touched]

    @cached_property
    def merged_rows(self) -> list[int]:
        """For each owner, the number of its rows that at least one rank touched."""
        union = torch.unique(torch.cat(self.touched))
        counts: list[int] = torch.searchsorted(union, torch.tensor(self.bounds)).diff().tolist()
        return counts

    @property
    def density(self) -> float:
        """Touched rows over the table's rows, mean over ranks."""
        return sum(map(len, self.touched)) / (len(self.touched) * self.problem.table_rows)


def leaving(counts: Sequence[Sequence[int]]) -> list[int]:
    """Return for each rank the number of touched rows that other ranks own. `counts`: by rank, then by owner."""
    return [sum(row) - row[rank] for rank, row in enumerate(counts)]
