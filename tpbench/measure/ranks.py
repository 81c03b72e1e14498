"""Numbers of every rank, on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tpbench.measure.session import Context


def of_all(value: float, context: Context) -> list[float]:
    """One number of every rank, by rank. Collective."""
    return [float(each) for each in by_rank([value], context)[0]]


def by_rank(mine: Sequence[float], context: Context) -> list[np.ndarray[Any, Any]]:
    """For each of this rank's numbers (equally many on all ranks) those of all ranks. Collective."""
    numbers = torch.tensor(mine, dtype=torch.float64)
    everyone = [torch.empty_like(numbers) for _ in range(context.world_size)]
    dist.all_gather(everyone, numbers)
    return list(torch.stack(everyone, dim=1).numpy())
