"""Choice between dense and sparse in each step: rows of the busiest rank against a limit calibrated at the start."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpbench.measure.clock import Stopwatch
from tpbench.workloads.embedding_grad.exchanges import DenseReduceScatter, Exchange, Phase, sequence
from tpbench.workloads.embedding_grad.exchanges.collectives import COUNT_BYTES, CountedCollectives
from tpbench.workloads.embedding_grad.exchanges.sparse import SparseAllToAll
from tpbench.workloads.embedding_grad.inputs import EmbeddingGradInputs, busiest
from tpbench.workloads.embedding_grad.row_operations.search import row_finder

CALIBRATED_AT = (0.2, 0.8)
"""Densities at which the sparse exchange is timed. A line through both is within 1 or 2 % of its time in between."""

UNKNOWN = -1
"""Count that a rank sends if it does not know its touched rows."""


class SparseAuto(Exchange):
    """Dense or sparse exchange. All ranks gather all counts, and therefore choose alike without a further message."""

    def __init__(
        self,
        inputs: EmbeddingGradInputs,
        comm: CountedCollectives,
        dense: DenseReduceScatter,
        sparse: SparseAllToAll,
        limit: float,
    ) -> None:
        """Choose dense above the density `limit`, or above the busiest rank's equivalent of that density."""
        super().__init__(inputs, comm)
        self.dense, self.sparse, self.limit = dense, sparse, limit
        self.overwrites = sparse.overwrites
        self.used: Exchange = dense
        counts = Phase("counts", self.choose, after="batch", on_host=True)
        later = [self._if_used(sparse, phase) for phase in sparse.phases[1:]]
        self.phases = (counts, *later, self._if_used(dense, dense.phases[0]))

    def choose(self) -> None:
        """Gather all counts and choose."""
        touched = self.sparse.finder.find()
        own_counts = touched.counts if touched is not None else [UNKNOWN] * self.comm.world_size
        counts = self.comm.gather_counts(own_counts)
        self.used = self.dense
        if sparse_is_faster(counts, self.inputs.problem.table_rows, self.limit):
            assert touched is not None
            self.used, rank = self.sparse, self.inputs.rank
            self.sparse.begin(touched, [0 if peer == rank else row[rank] for peer, row in enumerate(counts)])

    def _if_used(self, exchange: Exchange, phase: Phase) -> Phase:
        def run() -> None:
            if self.used is exchange:
                phase.run()

        return Phase(phase.name, run, phase.after, phase.on_host)

    def result(self) -> Tensor:
        return self.used.result()

    def release(self) -> None:
        self.dense.release()
        self.sparse.release()

    def expected_bytes(self) -> list[int]:
        """Return the bytes of the chosen exchange, but with all counts of a rank sent to each peer."""
        peers = self.comm.world_size - 1
        all_counts = COUNT_BYTES * self.comm.world_size * peers
        own_counts = COUNT_BYTES * peers if self.used is self.sparse else 0
        return [sent + all_counts - own_counts for sent in self.used.expected_bytes()]

    def columns(self) -> dict[str, Any]:
        return {**self.used.columns(), "crossover_density": self.limit}

    def known_rows(self) -> Tensor | None:
        return self.used.known_rows()


def sparse_is_faster(counts: list[list[int]], table_rows: int, limit: float) -> bool:
    """Return true if a sparse exchange of these counts is possible and faster.

    It is not possible if a rank does not know its rows.
    """
    if any(UNKNOWN in row for row in counts):
        return False
    ranks = len(counts)
    return busiest(counts) * ranks / (ranks - 1) <= limit * table_rows


def calibrate(
    inputs: EmbeddingGradInputs, dense: DenseReduceScatter, sparse: SparseAllToAll, stopwatch: Stopwatch
) -> float:
    """Return the density at which both take equal time on this machine. Collective; the same on every rank.

    The times are of the device, on a CPU of the whole exchange. They include a search on the device, for which the host
    waits. Touched rows are evenly spaced over the table, with the values that the gradient has there.
    """
    saved_slice, finder, table_rows = inputs.own_slice.clone(), sparse.finder, inputs.problem.table_rows
    points = []
    for density in CALIBRATED_AT:
        rows = max(1, round(density * table_rows))
        tokens = torch.arange(rows) * table_rows // rows
        sparse.finder = row_finder(inputs, tokens.to(torch.int32)[None])
        points.append((density, stopwatch.ms(sequence(sparse.phases))))
    dense_ms = stopwatch.ms(dense.reduce)
    sparse.finder = finder
    sparse.release()
    dense.release()
    inputs.own_slice.copy_(saved_slice)
    if inputs.device.type == "cuda":
        torch.cuda.empty_cache()
    return equal_time(points[0], points[1], dense_ms)


def equal_time(first: tuple[float, float], second: tuple[float, float], dense_ms: float) -> float:
    """Return the density at which a line through two (density, ms) points reaches `dense_ms`, also outside them."""
    slope = (second[1] - first[1]) / (second[0] - first[0])
    if slope <= 0:  # noise, if latency is the whole time: sparse is faster at every density or at none
        return float("inf") if first[1] <= dense_ms else 0.0
    return max(0.0, first[0] + (dense_ms - first[1]) / slope)
