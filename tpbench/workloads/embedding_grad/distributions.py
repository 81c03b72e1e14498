"""Which row each token falls on: a function of (seed, rank, step, position), made on the CPU.

A rank's tokens do not depend on how many ranks there are, but for `one_owner`, whose owner's share does.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from tpbench.workloads.embedding_grad.owners import Owners
from tpbench.workloads.embedding_grad.problem import Distribution, EmbeddingGrad
from tpbench.workloads.embedding_grad.text import TEXT
from tpbench.workloads.hashing import hash_index

_UNIFORM, _ZIPF, _SCATTER, _FIXED = range(33, 37)
"""Streams: independent numbers from one seed."""

COMMON = 3
"""Words that the text has so often are in every text; the others are of one text alone."""


def token_rows(problem: EmbeddingGrad, owners: Owners, rank: int) -> Tensor:
    """(accumulate, tokens) int32: the rows of one rank's tokens; (accumulate, 0) where it touches none."""
    position = torch.arange(problem.tokens_a_rank) + rank * problem.tokens_a_rank
    if problem.distribution == "none" or (problem.distribution == "one_rank" and rank > 0):
        position = position[:0]
    rows = _RULES[problem.distribution](problem, owners, rank, position)
    return rows.to(torch.int32).view(problem.accumulate, -1)


def _uniform(problem: EmbeddingGrad, owners: Owners, rank: int, position: Tensor) -> Tensor:
    return (hash_index(problem.seed, _UNIFORM, position) * problem.table_rows) >> 32


def _one_owner(problem: EmbeddingGrad, owners: Owners, rank: int, position: Tensor) -> Tensor:
    return (hash_index(problem.seed, _UNIFORM, position) * owners.held(0)) >> 32


def _zipf(problem: EmbeddingGrad, owners: Owners, rank: int, position: Tensor) -> Tensor:
    """Word k of the vocabulary with probability log(1 + 1/k) / log(1 + table_rows), scattered over the table."""
    share = hash_index(problem.seed, _ZIPF, position).double() / 2**32
    word = (share * math.log(problem.table_rows + 1)).exp_().long().clamp_(1, problem.table_rows)
    return (hash_index(problem.seed, _SCATTER, word) * problem.table_rows) >> 32


def _bigram(problem: EmbeddingGrad, owners: Owners, rank: int, position: Tensor) -> Tensor:
    """Hashed bigrams as in the record (`get_bigram_hash`): a step's first token has the last row to itself.

    The text, read again and again, stands for a long one: its common words stay, the others are new on each reading.
    """
    words, vocabulary, common = _words()
    reading, place = np.divmod(position.numpy(), len(words))
    word = words[place]
    token = np.where(common[word], word, word + (reading + 1) * vocabulary).astype(np.int32)
    mixed = (np.int32(36313) * token[1:]) ^ (np.int32(27191) * token[:-1])  # wraps, as int32 does on a GPU
    rows = np.full(len(token), problem.table_rows - 1, dtype=np.int64)
    rows[1:] = mixed % max(1, problem.table_rows - 1)
    rows[:: problem.tokens] = problem.table_rows - 1
    return torch.from_numpy(rows)


def _words() -> tuple[np.ndarray, int, np.ndarray]:  # type: ignore[type-arg]
    """The text's words as numbers, how many different ones there are, and which of those are common."""
    found = re.findall(r"[a-z']+", TEXT.lower())
    counts = Counter(found)
    number = {word: index for index, word in enumerate(counts)}
    common = np.array([counts[word] >= COMMON for word in counts])
    return np.array([number[word] for word in found]), len(counts), common


def _fixed(problem: EmbeddingGrad, owners: Owners, rank: int, position: Tensor) -> Tensor:
    """A given number of distinct rows, each as often as any other: rows of an arithmetic progression modulo the table,
    whose step has no factor in common with it."""
    size = problem.table_rows
    drawn = hash_index(problem.seed, _FIXED, torch.tensor([2 * rank, 2 * rank + 1]))
    start, step = int(drawn[0]), int(drawn[1]) % size or 1
    while math.gcd(step, size) != 1:
        step += 1
    return ((position - rank * problem.tokens_a_rank) % problem.distinct_fixed * step + start) % size


_RULES: dict[Distribution, Callable[[EmbeddingGrad, Owners, int, Tensor], Tensor]] = {
    "uniform": _uniform,
    "zipf": _zipf,
    "bigram": _bigram,
    "fixed": _fixed,
    "one_owner": _one_owner,
    "one_rank": _uniform,
    "none": _uniform,
}
