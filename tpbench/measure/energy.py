"""Energy of an iteration, from the GPU's energy counter."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from tpbench.measure.gpu import Gpu
from tpbench.measure.ranks import gather_number
from tpbench.measure.session import Context

SAMPLE_S = 1.0
"""Duration of the iterations whose energy is measured. GPUs update their counter every 20 to 100 ms."""

MOST_ITERATIONS = 10_000
"""Largest number of iterations of a sample. It bounds the sample if a variant replaced the clock."""

UPDATE_S = 0.15
"""Longest wait for an update of the counter."""


def iteration_energy_j(
    step: Callable[[], None],
    prepare: Callable[[], None],
    time_ms: float,
    gpu: Gpu | None,
    context: Context,
    sample_s: float = SAMPLE_S,
) -> float | None:
    """Return the energy of an iteration in J, summed over ranks, or None if a rank's GPU does not count it. Collective.

    Iterations run for about `sample_s`, queued one after the other: without cold caches, but with what `prepare` does
    before each, such as the restoring of inputs. The counter is read when it has just changed. `time_ms`: wall time of
    an iteration, equal on all ranks.
    """
    known = gpu is not None and gpu.energy_j() is not None
    if gpu is None or min(gather_number(known, context)) == 0:
        return None
    iterations = iterations_of_sample(time_ms, sample_s)

    def iteration() -> None:
        prepare()
        step()

    dist.barrier()
    sampled = sampled_j(iteration, iterations, gpu, lambda: torch.cuda.synchronize(context.device))
    energy_j = sum(gather_number(sampled / iterations, context))
    return energy_j if math.isfinite(energy_j) else None


def iterations_of_sample(time_ms: float, sample_s: float = SAMPLE_S) -> int:
    """Return the number of iterations of `time_ms` that take at least `sample_s`, at most `MOST_ITERATIONS`."""
    return max(1, math.ceil(min(MOST_ITERATIONS, sample_s / time_ms * 1e3)))


def sampled_j(
    iteration: Callable[[], None], iterations: int, gpu: Gpu, synchronize: Callable[[], None] = lambda: None
) -> float:
    """Run iterations and return by how many J the GPU's counter grew."""
    before_j = _updated_j(gpu)
    for _ in range(iterations):
        iteration()
    synchronize()
    return _updated_j(gpu) - before_j


def _updated_j(gpu: Gpu) -> float:
    """Return the counter right after it changes, or after `UPDATE_S`."""
    first_j, deadline_s = gpu.energy_j(), time.monotonic() + UPDATE_S
    now_j = first_j
    while now_j == first_j and time.monotonic() < deadline_s:
        now_j = gpu.energy_j()
    return now_j if now_j is not None else math.nan
