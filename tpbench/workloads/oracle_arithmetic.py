"""Arithmetic that the float64 oracles of the losses share."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def weighted(weight: Tensor, value: Tensor) -> Tensor:
    """Return weight * value, and 0 where the weight is 0, since 0 log 0 = 0."""
    return torch.where(weight == 0, 0.0, weight * value)


def relative_error(got: Tensor, right: Tensor) -> Tensor:
    """Return |got - right| / max(1, |right|) in float64: 0 for equal values, even infinite; inf for a NaN.

    A tensor of another shape has the error (1,) inf.
    """
    if got.shape != right.shape:
        return torch.full((1,), math.inf, dtype=torch.float64, device=right.device)
    got, right = got.double(), right.double()
    error = (got - right).abs() / right.abs().clamp(min=1.0)
    return torch.where(got == right, 0.0, error.nan_to_num(nan=math.inf, posinf=math.inf))


def bits(values: Tensor | None, count: int, device: torch.device) -> Tensor:
    """Return (1 + count,) int32: the number of values, and the bits of each in fp32.

    Without values, or with another number of them, the bits are 0. The shape depends on `count` alone, so all ranks can
    reduce the result even if their variants returned different shapes.
    """
    numel = -1 if values is None else values.numel()
    result = torch.zeros(1 + count, dtype=torch.int32, device=device)
    result[0] = numel
    if values is not None and numel == count:
        result[1:] = values.reshape(-1).float().view(torch.int32)
    return result
