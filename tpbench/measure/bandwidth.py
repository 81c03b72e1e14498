"""The bandwidth that this machine really has: what floors are made of."""

from __future__ import annotations

import itertools
import statistics
import time

import torch
import torch.distributed as dist

COPIES = 9
BYTES = {"cuda": 2**31, "cpu": 2**26}
"""Large against the caches, small against the memory."""


def copy_gb_per_s(device: torch.device) -> float:
    """GB/s of a large copy on one rank, bytes read plus bytes written, while every rank copies (on a CPU they share the
    memory, and so do the variants). The median of a few, the slowest rank's, in bytes 1e9.
    """
    source = torch.ones(BYTES[device.type] // 2, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    dist.barrier()
    seconds = (_device_seconds if device.type == "cuda" else _host_seconds)(target, source)[
        1:
    ]  # one to touch the pages
    rate = torch.tensor(2 * source.nbytes / statistics.median(seconds) / 1e9, dtype=torch.float64)
    dist.all_reduce(rate, op=dist.ReduceOp.MIN)
    del source, target
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return float(rate)


def _device_seconds(target: torch.Tensor, source: torch.Tensor) -> list[float]:
    """All copies are queued before the first ends, so that no launch lies between two events."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(COPIES + 2)]
    for event in events:
        event.record()
        target.copy_(source)
    torch.cuda.synchronize(source.device)
    return [begin.elapsed_time(end) / 1e3 for begin, end in itertools.pairwise(events)]


def _host_seconds(target: torch.Tensor, source: torch.Tensor) -> list[float]:
    marks = [time.perf_counter()]
    for _ in range(COPIES + 1):
        target.copy_(source)
        marks.append(time.perf_counter())
    return [end - begin for begin, end in itertools.pairwise(marks)]
