"""Hashed bigrams: rows of a table for pairs of tokens, as the speed record computes them (`get_bigram_hash`)."""

from __future__ import annotations

import torch
from torch import Tensor

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
