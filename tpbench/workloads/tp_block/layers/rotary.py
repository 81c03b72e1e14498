"""Rotary position embedding of queries and keys, as Llama 3 has it.

Number i of the first half of a head and number i of its second half are a point in a plane. The position of the row
times THETA^(-2 i / head_dim) is the angle by which the point is rotated.
"""

from __future__ import annotations

import torch
from torch import Tensor

THETA = 500_000.0
"""Base of the angles in Llama 3."""


def angles(tokens: int, head_dim: int, device: torch.device) -> Tensor:
    """Return the angle of each position and pair: (tokens, head_dim / 2), float64."""
    frequencies = THETA ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim)
    return torch.arange(tokens, dtype=torch.float64, device=device)[:, None] * frequencies


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x (..., tokens, head_dim) rotated by angles with these cosines and sines (tokens, head_dim / 2)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
