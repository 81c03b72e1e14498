"""Gather numbers of every rank on every rank."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tpbench.measure.session import Context


def gather_number(value: float, context: Context) -> list[float]:
    """Return one number of every rank, in rank order. Collective."""
    return [float(number) for number in gather_numbers([value], context)[0]]


def gather_numbers(values: Sequence[float], context: Context) -> list[np.ndarray[Any, Any]]:
    """Return for each of this rank's numbers an array: that number on every rank, (world_size,) float64. Collective."""
    numbers = torch.tensor(values, dtype=torch.float64)
    by_rank = [torch.empty_like(numbers) for _ in range(context.world_size)]
    dist.all_gather(by_rank, numbers)
    return list(torch.stack(by_rank, dim=1).numpy())


def from_rank_0(numbers: Sequence[int]) -> list[int]:
    """Return the numbers of rank 0. Collective, if there is a process group."""
    agreed = torch.tensor(numbers)
    if dist.is_initialized():
        dist.broadcast(agreed, src=0)
    return [int(number) for number in agreed]


def on_any_rank(flag: bool, context: Context) -> bool:
    """Return True if the flag is set on any rank. Collective."""
    return max(gather_number(float(flag), context)) > 0
