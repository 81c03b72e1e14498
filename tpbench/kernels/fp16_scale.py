"""The loss scale of fp16 gradients of a mean."""

from __future__ import annotations

import math

MOST = 2**14
"""Largest scale: with it the gradient stays in fp16's range even if one row of many counts."""


def fp16_gradient_scale(rows: int, *factors: float) -> float:
    """Return the power of two that an fp16 gradient of the mean over `rows` rows is multiplied by while it is stored.

    The division by the rows would round small gradients to zero (Micikevicius et al. 2018, arXiv:1710.03740, section
    3.2), so the scale is near the number of rows. It is smaller if other `factors` already increase the gradient.
    """
    room = min(rows, MOST) / max(abs(math.prod(factors)), 1.0)
    return float(2 ** max(0, math.floor(math.log2(max(room, 1.0)))))
