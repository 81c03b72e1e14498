"""What this machine's collectives reach: the bandwidths and the latency that floors and predictions are made of."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from tpbench.measure.stopwatch import Stopwatch
from tpbench.workloads.embedding_grad import traffic
from tpbench.workloads.embedding_grad.inputs import Inputs
from tpbench.workloads.embedding_grad.wire import Wire

SERIES = 3
"""Medians of the latency, of which the least is taken."""


@dataclass(frozen=True)
class Links:
    """In bytes that one rank sends, 1e9 a second, while all send; the same on every rank."""

    all_to_all_gb_per_s: float
    """Of an all-to-all of the whole table's parts, its latency taken off."""
    reduce_scatter_gb_per_s: float
    """Of the dense reduce-scatter itself."""
    latency_ms: float
    """Time of an all-to-all of one row a peer."""
    upload_gb_per_s: float | None
    """Of a copy of a number for each row from pinned memory to the GPU, its latency taken off; None on a CPU."""

    def wire_ms(self, sent: int) -> float:
        """The least time for so many bytes from one rank."""
        return sent / max(self.all_to_all_gb_per_s, self.reduce_scatter_gb_per_s) / 1e6


def measure(inputs: Inputs, wire: Wire, stopwatch: Stopwatch) -> Links:
    """Collective. The gradient serves as the sender's buffer and stays as it is."""
    rows_each, ranks = inputs.owners.rows_each, inputs.owners.world_size
    output = inputs.grad.new_empty((ranks - 1) * rows_each, inputs.grad.shape[1])

    def all_to_all(rows: int) -> float:
        splits = [0 if rank == inputs.rank else rows for rank in range(ranks)]
        out, leaving = output[: sum(splits)], inputs.grad[: sum(splits)]
        return stopwatch.ms(lambda: wire.all_to_all(out, leaving, splits, splits))

    # A hiccup can outlast a whole series of so short transfers: the least of a few series is the machine's.
    latency_ms = min(all_to_all(1) for _ in range(SERIES))
    transfer_ms = _without(latency_ms, all_to_all(rows_each))
    dense_ms = stopwatch.ms(lambda: wire.reduce_scatter_mean(output[:rows_each], inputs.grad))
    sent = traffic.dense_reduce_scatter(len(inputs.grad), inputs.row_bytes, ranks)
    wire.reset()
    return Links(sent / transfer_ms / 1e6, sent / dense_ms / 1e6, latency_ms, _upload_gb_per_s(inputs, stopwatch))


def _upload_gb_per_s(inputs: Inputs, stopwatch: Stopwatch) -> float | None:
    if inputs.device.type == "cpu":
        return None
    numbers = torch.zeros(len(inputs.grad), dtype=torch.int32, pin_memory=True)

    def upload(count: int) -> None:
        numbers[:count].to(inputs.device, non_blocking=True)

    latency_ms, ms = (stopwatch.ms(partial(upload, count)) for count in (1, len(numbers)))
    return numbers.nbytes / _without(latency_ms, ms) / 1e6


def _without(latency_ms: float, ms: float) -> float:
    """What a transfer takes past its latency; all of it where that is most of it, as of small tables on a CPU."""
    return ms - latency_ms if ms > 2 * latency_ms else ms
