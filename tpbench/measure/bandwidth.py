"""The copy bandwidth of this machine, from which floors are computed."""

from __future__ import annotations

import itertools
import statistics
import time

import torch
import torch.distributed as dist

COPIES = 9
BYTES = {"cuda": 2**31, "cpu": 2**26}
"""Source and target together: large against the caches, small against the memory."""


def copy_gb_per_s(device: torch.device) -> float:
    """Measure a large copy within each rank's memory, in 1e9 bytes per second. Collective.

    Bytes read and bytes written both count. All ranks copy at once: on a CPU they share the memory bandwidth, as the
    variants do. The result is the median of `COPIES` copies on the slowest rank.
    """
    source = torch.ones(BYTES[device.type] // 2, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    dist.barrier()
    seconds = (_device_seconds if device.type == "cuda" else _host_seconds)(target, source)
    median_s = statistics.median(seconds[1:])  # the first copy touches the pages of the target
    rate = torch.tensor(2 * source.nbytes / median_s / 1e9, dtype=torch.float64)
    dist.all_reduce(rate, op=dist.ReduceOp.MIN)
    del source, target
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return float(rate)


def _device_seconds(target: torch.Tensor, source: torch.Tensor) -> list[float]:
    """Queue all copies before the first one ends, so that no launch time lies between two events."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(COPIES + 2)]
    for event in events:
        event.record()
        target.copy_(source)
    torch.cuda.synchronize(source.device)
    return [begin.elapsed_time(end) / 1e3 for begin, end in itertools.pairwise(events)]


def _host_seconds(target: torch.Tensor, source: torch.Tensor) -> list[float]:
    times_s = [time.perf_counter()]
    for _ in range(COPIES + 1):
        target.copy_(source)
        times_s.append(time.perf_counter())
    return [end - begin for begin, end in itertools.pairwise(times_s)]
