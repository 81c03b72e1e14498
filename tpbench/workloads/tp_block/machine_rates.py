"""What this machine reaches: the rate of a large product, and the bandwidth of a large all-gather."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tpbench.measure.gemm import gemm_tflops
from tpbench.measure.stopwatch import Stopwatch
from tpbench.workloads.tp_block.inputs import BlockInputs
from tpbench.workloads.tp_block.schedule import SequentialSchedule

SHARD_BYTES = {"cuda": 2**26, "cpu": 2**20}
"""Of each rank, in the all-gather: large against its latency."""


@dataclass(frozen=True)
class MachineRates:
    """The same on every rank, the slowest's."""

    gemm_tflops: float
    """Of a large product in the problem's dtype, while all ranks compute, TFLOP/s."""
    gather_gb_per_s: float
    """Bytes that a rank receives in a large all-gather, 1e9 a second; 0 where there is one rank."""

    def wire_ms(self, received: int) -> float:
        """The least time to receive so many bytes."""
        return received / self.gather_gb_per_s / 1e6 if received else 0.0


def measure(inputs: BlockInputs, stopwatch: Stopwatch) -> MachineRates:
    """Collective."""
    reached = gemm_tflops(inputs.dtype, inputs.device, stopwatch)
    if inputs.size == 1:
        return MachineRates(reached, 0.0)
    shard = torch.zeros(SHARD_BYTES[inputs.device.type], 1, dtype=torch.uint8, device=inputs.device)
    schedule = SequentialSchedule(inputs.group)

    def gather() -> None:
        schedule.gather(shard)

    return MachineRates(reached, shard.nbytes * (inputs.size - 1) / stopwatch.ms(gather) / 1e6)
