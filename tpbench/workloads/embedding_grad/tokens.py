"""The partition of the table over its owners, and the table row of each token.

A row is a function of (seed, rank, step, position), computed on the CPU. A rank's tokens do not depend on
the number of ranks, except under `one_owner`, where the owner's share does.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tpbench.workloads.embedding_grad.problem import Distribution, EmbeddingGrad
from tpbench.workloads.hashing import hash_index

_UNIFORM, _ZIPF, _SCATTER, _FIXED, _TEXT = range(33, 38)
"""Streams of `hash_index`: independent numbers from one seed."""

VOCABULARY = 50257
"""Tokens of GPT-2's vocabulary, whose texts the speed record trains on."""

COMMON = 3
"""A word that the sample text has at least so often is common to all readings; other words are new in each."""


@dataclass(frozen=True)
class RowPartition:
    """Consecutive rows for each rank, the same number for all. Padding at the table's end makes the shares equal."""

    table_rows: int
    world_size: int

    @property
    def rows_per_rank(self) -> int:
        """Rows of a rank, padding included."""
        return -(-self.table_rows // self.world_size)

    @property
    def padded_rows(self) -> int:
        """Rows of the padded table."""
        return self.rows_per_rank * self.world_size

    def first_row(self, rank: int) -> int:
        """Return the first row of a rank."""
        return rank * self.rows_per_rank

    def unpadded_rows(self, rank: int) -> int:
        """Return how many rows of a rank belong to the table: fewer, or none, on the last ranks."""
        return max(0, min(self.rows_per_rank, self.table_rows - self.first_row(rank)))

    @property
    def bounds(self) -> list[int]:
        """First row of each rank, then the end of the last rank's rows: `world_size + 1` numbers."""
        return [self.first_row(rank) for rank in range(self.world_size + 1)]


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


FACTORS = (36313, 27191)
"""Factors of a token and of the token before it."""


def bigram_rows(tokens: Tensor, table_rows: int, out: Tensor | None = None) -> Tensor:
    """Return the row of each token and the token before it, on the tokens' device.

    The first token of a step has no token before it, and has the last row. Integers wrap, as int32 does on a GPU.

    tokens: (steps, tokens) int32. out: tensor of the same shape and dtype for the result.
    """
    rows = torch.empty_like(tokens) if out is None else out
    mixed = (tokens[:, 1:] * FACTORS[0]).bitwise_xor_(tokens[:, :-1] * FACTORS[1])
    torch.remainder(mixed, max(1, table_rows - 1), out=rows[:, 1:])
    rows[:, :1] = table_rows - 1
    return rows


SAMPLE_TEXT = """
Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in Liberty, and
dedicated to the proposition that all men are created equal. Now we are engaged in a great civil war, testing whether
that nation, or any nation so conceived and so dedicated, can long endure. We are met on a great battle-field of that
war. We have come to dedicate a portion of that field, as a final resting place for those who here gave their lives
that that nation might live. It is altogether fitting and proper that we should do this. But, in a larger sense, we can
not dedicate, we can not consecrate, we can not hallow this ground. The brave men, living and dead, who struggled here,
have consecrated it, far above our poor power to add or detract. The world will little note, nor long remember what we
say here, but it can never forget what they did here. It is for us the living, rather, to be dedicated here to the
unfinished work which they who fought here have thus far so nobly advanced. It is rather for us to be here dedicated to
the great task remaining before us, that from these honored dead we take increased devotion to that cause for which
they gave the last full measure of devotion, that we here highly resolve that these dead shall not have died in vain,
that this nation, under God, shall have a new birth of freedom, and that government of the people, by the people, for
the people, shall not perish from the earth.

When in the Course of human events, it becomes necessary for one people to dissolve the political bands which have
connected them with another, and to assume among the powers of the earth, the separate and equal station to which the
Laws of Nature and of Nature's God entitle them, a decent respect to the opinions of mankind requires that they should
declare the causes which impel them to the separation. We hold these truths to be self-evident, that all men are
created equal, that they are endowed by their Creator with certain unalienable Rights, that among these are Life,
Liberty and the pursuit of Happiness. That to secure these rights, Governments are instituted among Men, deriving their
just powers from the consent of the governed, That whenever any Form of Government becomes destructive of these ends,
it is the Right of the People to alter or to abolish it, and to institute new Government, laying its foundation on such
principles and organizing its powers in such form, as to them shall seem most likely to effect their Safety and
Happiness.

Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse, and nothing
particular to interest me on shore, I thought I would sail about a little and see the watery part of the world. It is a
way I have of driving off the spleen and regulating the circulation. Whenever I find myself growing grim about the
mouth; whenever it is a damp, drizzly November in my soul; whenever I find myself involuntarily pausing before coffin
warehouses, and bringing up the rear of every funeral I meet; and especially whenever my hypos get such an upper hand
of me, that it requires a strong moral principle to prevent me from deliberately stepping into the street, and
methodically knocking people's hats off, then, I account it high time to get to sea as soon as I can. This is my
substitute for pistol and ball. With a philosophical flourish Cato throws himself upon his sword; I quietly take to the
ship. There is nothing surprising in this. If they but knew it, almost all men in their degree, some time or other,
cherish very nearly the same feelings towards the ocean with me.
"""
