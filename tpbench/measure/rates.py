"""The rates that this machine reaches, from which floors are computed: of copies, products and all-gathers."""

import itertools
import statistics

import torch
import torch.distributed as dist

from tpbench.kernels.distributed import all_gather
from tpbench.measure.timers import Stopwatch, mark, ms_between, synchronize

COPIES = 9
BYTES = {"cuda": 2**31, "cpu": 2**26}
"""Source and target together: large against the caches, small against the memory."""

SIDE = {"cuda": 8192, "cpu": 512}
"""Rows and columns of the square matrices that are multiplied."""

SHARD_BYTES = {"cuda": 2**26, "cpu": 2**20}
"""Bytes of each rank in the all-gather that measures the bandwidth between ranks, whatever its latency."""


def copy_gb_per_s(device: torch.device) -> float:
    """Return the 1e9 bytes per second, read and written, of large copies by all ranks at once, on the slowest rank."""
    source = torch.ones(BYTES[device.type] // 2, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    dist.barrier()
    marks = []
    for copy in range(COPIES + 2):  # all are queued before the first one ends: no launch time lies between two marks
        if copy:
            target.copy_(source)
        marks.append(mark(device))
    synchronize(device)
    times_ms = itertools.starmap(ms_between, itertools.pairwise(marks))
    median_s = statistics.median([*times_ms][1:]) / 1e3  # the first copy touches the pages of the target
    rate = torch.tensor(2 * source.nbytes / median_s / 1e9, dtype=torch.float64)
    dist.all_reduce(rate, op=dist.ReduceOp.MIN)
    del source, target
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return float(rate)


def gemm_tflops(dtype: torch.dtype, device: torch.device, stopwatch: Stopwatch) -> float:
    """Measure a large matrix product while all ranks compute: the slowest rank's rate in TFLOP/s. Collective."""
    side = SIDE[device.type]
    # Not zeros: a product of zeros draws less power and runs at higher clocks.
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)

    def multiply() -> None:
        torch.mm(left, right, out=product)

    return 2 * side**3 / stopwatch.ms(multiply) / 1e9


def gather_gb_per_s(device: torch.device, group: dist.ProcessGroup, stopwatch: Stopwatch) -> float:
    """Return the bytes that a rank receives in a large all-gather, in 1e9 bytes per second. Collective."""
    shard = torch.zeros(SHARD_BYTES[device.type], dtype=torch.uint8, device=device)
    whole = shard.new_empty(group.size() * len(shard))
    milliseconds = stopwatch.ms(lambda: all_gather(whole, shard, group=group))
    return shard.nbytes * (group.size() - 1) / milliseconds / 1e6


def compute_ms(flops: int, tflops: float) -> float:
    """Return the least time in ms for `flops` floating-point operations at a rate in TFLOP/s."""
    return flops / tflops / 1e9
