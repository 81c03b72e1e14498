"""Token rows: the table row of each token, as a function of (seed, rank, step, position), computed on the CPU.

A rank's tokens do not depend on the number of ranks, except under `one_owner`, where the owner's share does.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from tpbench.workloads.embedding_grad.problem import Distribution, EmbeddingGrad
from tpbench.workloads.embedding_grad.tokens.bigrams import bigram_rows
from tpbench.workloads.embedding_grad.tokens.row_partition import RowPartition
from tpbench.workloads.embedding_grad.tokens.sample_text import SAMPLE_TEXT
from tpbench.workloads.hashing import hash_index

_UNIFORM, _ZIPF, _SCATTER, _FIXED, _TEXT = range(33, 38)
"""Streams of `hash_index`: independent numbers from one seed."""

VOCABULARY = 50257
"""Tokens of GPT-2's vocabulary, whose texts the speed record trains on."""

COMMON = 3
"""A word that the sample text has at least so often is common to all readings; other words are new in each."""


def token_rows(problem: EmbeddingGrad, partition: RowPartition, rank: int) -> Tensor:
    """Return the rows of one rank's tokens, (accumulate, tokens) int32, or (accumulate, 0) if it touches none."""
    position = torch.arange(problem.tokens_per_rank) + rank * problem.tokens_per_rank
    if problem.distribution == "none" or (problem.distribution == "one_rank" and rank > 0):
        position = position[:0]
    rows = _RULES[problem.distribution](problem, partition, rank, position)
    return rows.to(torch.int32).view(problem.accumulate, -1)


def _uniform(problem: EmbeddingGrad, partition: RowPartition, rank: int, position: Tensor) -> Tensor:
    return (hash_index(problem.seed, _UNIFORM, position) * problem.table_rows) >> 32


def _one_owner(problem: EmbeddingGrad, partition: RowPartition, rank: int, position: Tensor) -> Tensor:
    return (hash_index(problem.seed, _UNIFORM, position) * partition.unpadded_rows(0)) >> 32


def _zipf(problem: EmbeddingGrad, partition: RowPartition, rank: int, position: Tensor) -> Tensor:
    """Draw word k with probability log(1 + 1/k) / log(1 + table_rows), and scatter words over the table."""
    word = _zipf_words(hash_index(problem.seed, _ZIPF, position), problem.table_rows)
    return (hash_index(problem.seed, _SCATTER, word) * problem.table_rows) >> 32


def _bigram(problem: EmbeddingGrad, partition: RowPartition, rank: int, position: Tensor) -> Tensor:
    """Hash bigrams of the sample text.

    Repeated readings of the sample text stand for a long text: common words stay the same, others change each time.
    """
    words, vocabulary, common = _words()
    reading, place = np.divmod(position.numpy(), len(words))
    word = words[place]
    token = np.where(common[word], word, word + (reading + 1) * vocabulary).astype(np.int32)
    tokens = torch.from_numpy(token).view(-1, problem.tokens)
    return bigram_rows(tokens, problem.table_rows).flatten()


def _zipf_bigram(problem: EmbeddingGrad, partition: RowPartition, rank: int, position: Tensor) -> Tensor:
    return bigram_rows(text_tokens(problem, rank), problem.table_rows).flatten()


def text_tokens(problem: EmbeddingGrad, rank: int) -> Tensor:
    """Return the tokens of one rank's text under distribution=zipf_bigram, (accumulate, tokens) int32 on the CPU.

    Token k - 1 of the vocabulary has probability log(1 + 1/k) / log(1 + VOCABULARY): about 1/k, as in natural language.
    Real text has fewer distinct pairs, because neighbours depend on each other.
    """
    position = torch.arange(problem.tokens_per_rank) + rank * problem.tokens_per_rank
    word = _zipf_words(hash_index(problem.seed, _TEXT, position), VOCABULARY)
    return (word - 1).to(torch.int32).view(problem.accumulate, problem.tokens)


def _zipf_words(hashed: Tensor, words: int) -> Tensor:
    """Return for each hash a word from 1 to `words`: k with probability log(1 + 1/k) / log(1 + words)."""
    return (hashed.double() / 2**32 * math.log(words + 1)).exp_().long().clamp_(1, words)


def _words() -> tuple[np.ndarray, int, np.ndarray]:  # type: ignore[type-arg]
    """Return the words of the sample text as numbers, the number of distinct words, and a mask of the common ones."""
    words = re.findall(r"[a-z']+", SAMPLE_TEXT.lower())
    counts = Counter(words)
    number = {word: index for index, word in enumerate(counts)}
    common = np.array([counts[word] >= COMMON for word in counts])
    return np.array([number[word] for word in words]), len(counts), common


def _fixed(problem: EmbeddingGrad, partition: RowPartition, rank: int, position: Tensor) -> Tensor:
    """Return a given number of distinct rows, all equally often.

    The rows are an arithmetic progression modulo the table, whose step has no common factor with the table's rows.
    """
    size = problem.table_rows
    drawn = hash_index(problem.seed, _FIXED, torch.tensor([2 * rank, 2 * rank + 1]))
    start, step = int(drawn[0]), int(drawn[1]) % size or 1
    while math.gcd(step, size) != 1:
        step += 1
    return ((position - rank * problem.tokens_per_rank) % problem.distinct_fixed * step + start) % size


_RULES: dict[Distribution, Callable[[EmbeddingGrad, RowPartition, int, Tensor], Tensor]] = {
    "uniform": _uniform,
    "zipf": _zipf,
    "bigram": _bigram,
    "zipf_bigram": _zipf_bigram,
    "fixed": _fixed,
    "one_owner": _one_owner,
    "one_rank": _uniform,
    "none": _uniform,
}
