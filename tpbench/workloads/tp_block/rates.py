"""What this machine reaches: the rate of a large product, and the bandwidth of a large all-gather."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tpbench.measure.stopwatch import Stopwatch
from tpbench.workloads.tp_block.inputs import Inputs
from tpbench.workloads.tp_block.schedule import Sequential

SIDE = {"cuda": 8192, "cpu": 512}
"""Of the square matrices that are multiplied."""
SHARD_BYTES = {"cuda": 2**26, "cpu": 2**20}
"""Of each rank, in the all-gather: large against its latency."""


@dataclass(frozen=True)
class Rates:
    """The same on every rank, the slowest's."""

    gemm_tflops: float
    """Of a large product in the problem's dtype, while all ranks compute, TFLOP/s."""
    gather_gb_per_s: float
    """Bytes that a rank receives in a large all-gather, 1e9 a second; 0 where there is one rank."""

    def compute_ms(self, flops: int) -> float:
        """The least time for so many floating-point operations."""
        return flops / self.gemm_tflops / 1e9

    def wire_ms(self, received: int) -> float:
        """The least time to receive so many bytes."""
        return received / self.gather_gb_per_s / 1e6 if received else 0.0


def measure(inputs: Inputs, stopwatch: Stopwatch) -> Rates:
    """Collective."""
    side = SIDE[inputs.device.type]
    # Not zeros: a product of zeros draws less power and runs at higher clocks.
    left, right = (torch.randn(side, side, device=inputs.device).to(inputs.dtype) for _ in range(2))
    product = torch.empty_like(left)

    def multiply() -> None:
        torch.mm(left, right, out=product)

    gemm_tflops = 2 * side**3 / stopwatch.ms(multiply) / 1e9
    if inputs.size == 1:
        return Rates(gemm_tflops, 0.0)
    shard = torch.zeros(SHARD_BYTES[inputs.device.type], 1, dtype=torch.uint8, device=inputs.device)
    schedule = Sequential(inputs.group)

    def gather() -> None:
        schedule.gather(shard)

    return Rates(gemm_tflops, shard.nbytes * (inputs.size - 1) / stopwatch.ms(gather) / 1e6)
