"""Where an output differs from the right one: its shape, its rank, how many elements, and the first of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Differences:
    """Elements of an output on one rank that differ from the right ones, and the first of them."""

    count: int = 0
    total: int = 0
    index: list[int] = field(default_factory=list)
    expected: float = 0.0
    got: float = 0.0

    def add(self, got: Tensor, expected: Tensor, differ: Tensor, first_row: int) -> None:
        """Count the elements of some rows."""
        count = int(differ.sum())
        self.total += differ.numel()
        if count and not self.count:
            self.index = index = differ.nonzero()[0].tolist()
            self.expected, self.got = float(expected[tuple(index)]), float(got[tuple(index)])
            self.index = [index[0] + first_row, *index[1:]] if index else []
        self.count += count


def malformed(
    name: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype | None, device: torch.device
) -> str | None:
    """Return how an output differs in type, shape, dtype, layout or device from the right one, or None if it doesn't.

    dtype: None for any real one.
    """
    dtypes = "" if dtype is None else f" {dtype}"
    expected = f"{shape}{dtypes} on {device.type}"
    got = "None" if value is None else f"of the type {type(value).__name__}"
    if isinstance(value, Tensor):
        dtypes = "" if dtype is None and not value.is_complex() else f" {value.dtype}"
        dtypes += "" if value.layout == torch.strided else f" {value.layout}"
        got = f"{tuple(value.shape)}{dtypes} on {value.device.type}"
    return None if got == expected else f"{name} is {got}, expected {expected}"


def place_of(rank: int, name: str, count: int, total: int, index: list[int], expected: float, got: float) -> str:
    """Return one sentence about the differences of an output on a rank. The arguments are fields of `Differences`."""
    if not index:
        return f"rank {rank}: {name} is {got:.6g}, expected {expected:.6g}"
    values = f"expected {expected:.6g}, got {got:.6g}"
    return f"rank {rank}: {count} of {total} elements of {name} differ, the first at {index}: {values}"
