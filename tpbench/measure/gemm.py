"""The rate of matrix products that this machine reaches."""

from __future__ import annotations

import torch

from tpbench.measure.stopwatch import Stopwatch

SIDE = {"cuda": 8192, "cpu": 512}
"""Rows and columns of the square matrices that are multiplied."""


def gemm_tflops(dtype: torch.dtype, device: torch.device, stopwatch: Stopwatch) -> float:
    """Measure a large matrix product while all ranks compute: the slowest rank's rate in TFLOP/s. Collective."""
    side = SIDE[device.type]
    # Not zeros: a product of zeros draws less power and runs at higher clocks.
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)

    def multiply() -> None:
        torch.mm(left, right, out=product)

    return 2 * side**3 / stopwatch.ms(multiply) / 1e9


def compute_ms(flops: int, tflops: float) -> float:
    """Return the least time in ms for `flops` floating-point operations at a rate in TFLOP/s."""
    return flops / tflops / 1e9
