"""Rates that this machine reaches: of a large matrix product, and of a large all-gather."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tpbench.comm.collectives import gather_rows
from tpbench.measure.gemm import compute_ms, gemm_tflops
from tpbench.measure.session import Costs
from tpbench.measure.stopwatch import Stopwatch
from tpbench.workloads.tp_block.inputs import BlockInputs
from tpbench.workloads.tp_block.measurement import costs
from tpbench.workloads.tp_block.problem import TpBlock

SHARD_BYTES = {"cuda": 2**26, "cpu": 2**20}
"""Bytes of each rank in the all-gather: large enough that its latency does not matter."""


@dataclass(frozen=True)
class MachineRates:
    """Rates of the slowest rank, the same on every rank."""

    gemm_tflops: float
    """A large matrix product in the problem's dtype while all ranks compute, in TFLOP/s."""
    gather_gb_per_s: float
    """Bytes that a rank receives in a large all-gather, in 1e9 bytes per second. 0 for one rank."""

    def wire_ms(self, received: int) -> float:
        """Return the least time in ms to receive that many bytes."""
        return received / self.gather_gb_per_s / 1e6 if received else 0.0

    def costs(self, problem: TpBlock, size: int, item: int) -> Costs:
        """Return the costs of an iteration on one of `size` ranks at these rates, for elements of `item` bytes."""
        flops = costs.flops(problem, size)
        return Costs(
            bytes_moved=costs.bytes_moved(problem, size, item),
            bytes_communicated=costs.bytes_sent(problem, size, item),
            flops=flops,
            compute_ms=compute_ms(flops, self.gemm_tflops),
            wire_ms=self.wire_ms(costs.bytes_sent(problem, size, item, least=True)),
        )


def measure(inputs: BlockInputs, stopwatch: Stopwatch) -> MachineRates:
    """Measure both rates. Collective."""
    tflops = gemm_tflops(inputs.dtype, inputs.device, stopwatch)
    if inputs.size == 1:
        return MachineRates(tflops, 0.0)
    shard = torch.zeros(SHARD_BYTES[inputs.device.type], 1, dtype=torch.uint8, device=inputs.device)

    def gather() -> None:
        gather_rows(shard, inputs.group)

    return MachineRates(tflops, shard.nbytes * (inputs.size - 1) / stopwatch.ms(gather) / 1e6)
