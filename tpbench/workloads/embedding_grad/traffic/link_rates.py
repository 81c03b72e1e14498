"""Bandwidths and latency of this machine's collectives, for floors and for the predicted crossover."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from tpbench.measure.stopwatch import Stopwatch
from tpbench.workloads.embedding_grad.inputs import EmbeddingGradInputs
from tpbench.workloads.embedding_grad.traffic import formulas
from tpbench.workloads.embedding_grad.traffic.counted_collectives import CountedCollectives

SERIES = 3
"""Number of latency measurements, of which the least counts."""


@dataclass(frozen=True)
class LinkRates:
    """Bandwidths in 1e9 bytes a second that one rank sends while all ranks send. The same on every rank."""

    all_to_all_gb_per_s: float
    """Bandwidth of an all-to-all of the whole table, without its latency."""
    reduce_scatter_gb_per_s: float
    """Bandwidth of the dense reduce-scatter."""
    latency_ms: float
    """Time of an all-to-all of one row a peer."""
    upload_gb_per_s: float | None
    """Bandwidth of a copy of all row numbers from pinned memory to the GPU, without its latency; None on a CPU."""
    link_gb_per_s: float
    """Bandwidth of the fastest single all-to-all or reduce-scatter; the others are medians."""

    def transfer_ms(self, sent: int) -> float:
        """Return the least time in ms in which one rank can send `sent` bytes."""
        return sent / self.link_gb_per_s / 1e6


def measure_link_rates(inputs: EmbeddingGradInputs, comm: CountedCollectives, stopwatch: Stopwatch) -> LinkRates:
    """Measure with the gradient, unchanged, as the sender's buffer. Collective."""
    rows_per_rank, ranks = inputs.partition.rows_per_rank, inputs.partition.world_size
    output = inputs.grad.new_empty((ranks - 1) * rows_per_rank, inputs.grad.shape[1])

    def all_to_all(rows: int) -> list[float]:
        splits = [0 if rank == inputs.rank else rows for rank in range(ranks)]
        received, sent = output[: sum(splits)], inputs.grad[: sum(splits)]
        return stopwatch.samples_ms(lambda: comm.all_to_all(received, sent, splits, splits))

    # A disturbance can outlast a whole series of such short transfers: the least of several series counts.
    latency_ms = min(median(all_to_all(1)) for _ in range(SERIES))
    transfers = [_without_latency(ms, latency_ms) for ms in all_to_all(rows_per_rank)]
    dense = stopwatch.samples_ms(lambda: comm.reduce_scatter_mean(output[:rows_per_rank], inputs.grad))
    megabytes = formulas.dense_reduce_scatter(len(inputs.grad), inputs.row_bytes, ranks) / 1e6
    comm.reset()
    return LinkRates(
        all_to_all_gb_per_s=megabytes / median(transfers),
        reduce_scatter_gb_per_s=megabytes / median(dense),
        latency_ms=latency_ms,
        upload_gb_per_s=_upload_gb_per_s(inputs, stopwatch),
        link_gb_per_s=megabytes / min(*transfers, *dense),
    )


def _upload_gb_per_s(inputs: EmbeddingGradInputs, stopwatch: Stopwatch) -> float | None:
    if inputs.device.type == "cpu":
        return None
    numbers = torch.zeros(len(inputs.grad), dtype=torch.int32, pin_memory=True)

    def upload(count: int) -> None:
        numbers[:count].to(inputs.device, non_blocking=True)

    latency_ms, ms = (stopwatch.ms(partial(upload, count)) for count in (1, len(numbers)))
    return numbers.nbytes / _without_latency(ms, latency_ms) / 1e6


def _without_latency(ms: float, latency_ms: float) -> float:
    """Subtract the latency, unless it is most of the time, as for small tables on a CPU."""
    return ms - latency_ms if ms > 2 * latency_ms else ms
