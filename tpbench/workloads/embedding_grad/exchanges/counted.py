"""Collectives over the data-parallel group that count the bytes sent to each peer, and the rates that they reach."""

from collections.abc import Sequence
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.comm import collectives
from tpbench.measure.timers import Stopwatch, do_nothing
from tpbench.workloads.embedding_grad.inputs import EmbeddingGradInputs


class CountedCollectives:
    """Collectives that count the bytes that they must send, whatever the library's routing (rings, trees)."""

    def __init__(self, group: dist.ProcessGroup, rank: int, world_size: int) -> None:
        self.group, self.rank, self.world_size = group, rank, world_size
        self.sent_bytes = [0] * world_size
        """Bytes sent to each rank since `reset`; for this rank always 0."""

    def reset(self) -> None:
        """Set the counts to zero."""
        self.sent_bytes = [0] * self.world_size

    def all_to_all(self, received: Tensor, sent: Tensor, receive_rows: Sequence[int], send_rows: Sequence[int]) -> None:
        """Send `send_rows[rank]` rows of `sent`, in rank order, to each rank."""
        row_bytes = sent[0:1].nbytes if len(sent) else 0
        self.count([rows * row_bytes for rows in send_rows])
        dist.all_to_all_single(received, sent, list(receive_rows), list(send_rows), group=self.group)

    def reduce_scatter_mean(self, part: Tensor, whole: Tensor) -> None:
        """Fill `part` with this rank's part of the mean of all ranks' `whole`."""
        self.count([part.nbytes] * self.world_size)
        collectives.reduce_scatter(part, whole, op=dist.ReduceOp.AVG, group=self.group)

    def gather_counts(self, own: Sequence[int]) -> list[list[int]]:
        """Return the counts of all ranks, by rank. On the CPU."""
        self.count([8 * len(own)] * self.world_size)  # int64
        own_counts = torch.tensor(own, dtype=torch.int64)
        gathered = own_counts.new_empty(self.world_size * len(own_counts))
        collectives.all_gather(gathered, own_counts, group=self.group)
        counts: list[list[int]] = gathered.view(self.world_size, -1).tolist()
        return counts

    def count(self, sizes: Sequence[int]) -> None:
        """Count bytes sent to each rank, without those of this rank to itself: also those that a kernel writes."""
        for peer, size in enumerate(sizes):
            self.sent_bytes[peer] += 0 if peer == self.rank else size


def measure_link_rates(inputs: EmbeddingGradInputs, comm: CountedCollectives, stopwatch: Stopwatch) -> dict[str, float]:
    """Measure with the gradient, unchanged, as the sender's buffer. Collective; the same on every rank.

    Return columns with bandwidths, in 1e9 bytes that one rank sends a second while all send, and a latency.
    `link_gb_per_s` is that of the fastest single transfer; the others are medians.
    """
    rows_per_rank, ranks = inputs.rows_per_rank, inputs.world_size
    output = inputs.grad.new_empty((ranks - 1) * rows_per_rank, inputs.grad.shape[1])

    def all_to_all(rows: int) -> list[float]:
        splits = [0 if rank == inputs.rank else rows for rank in range(ranks)]
        received, sent = output[: sum(splits)], inputs.grad[: sum(splits)]
        exchange = partial(comm.all_to_all, received, sent, splits, splits)
        return stopwatch.interleaved_ms((exchange, do_nothing))[0]

    latency_ms = median(all_to_all(1))
    # For small tables on a CPU latency is most of the time.
    transfers = [ms - latency_ms if ms > 2 * latency_ms else ms for ms in all_to_all(rows_per_rank)]
    reduce = partial(comm.reduce_scatter_mean, output[:rows_per_rank], inputs.grad)
    (dense,) = stopwatch.interleaved_ms((reduce, do_nothing))
    megabytes = inputs.own_slice.nbytes * (ranks - 1) / 1e6
    comm.reset()
    return {
        "all_to_all_gb_per_s": megabytes / median(transfers),
        "reduce_scatter_gb_per_s": megabytes / median(dense),
        "latency_ms": latency_ms,
        "link_gb_per_s": megabytes / min(*transfers, *dense),
    }
