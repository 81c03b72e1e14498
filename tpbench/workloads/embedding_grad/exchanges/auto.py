"""Choice between dense and sparse in each step: rows of the busiest rank against a limit calibrated at the start."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpbench.measure.clock import Stopwatch
from tpbench.workloads.embedding_grad.exchanges import DenseReduceScatter, Phase, sequence
from tpbench.workloads.embedding_grad.exchanges.collectives import CountedCollectives
from tpbench.workloads.embedding_grad.exchanges.sparse import SparseAllToAll
from tpbench.workloads.embedding_grad.inputs import EmbeddingGradInputs, busiest
from tpbench.workloads.embedding_grad.row_operations.search import RowFinder, row_finder

CALIBRATED_AT = (0.2, 0.8)
"""Densities at which the sparse exchange is timed. A line through both is within 1 or 2 % of its time in between."""


class SparseAuto(SparseAllToAll):
    """Dense or sparse exchange. All ranks gather all counts, and therefore choose alike without a further message.

    It is dense above the density `limit`, or above the busiest rank's equivalent of that density.
    """

    def __init__(
        self, inputs: EmbeddingGradInputs, comm: CountedCollectives, finder: RowFinder, stopwatch: Stopwatch
    ) -> None:
        self.dense = DenseReduceScatter(inputs, comm)
        super().__init__(inputs, comm, finder)
        self.limit = self.calibrated(stopwatch)
        counts = Phase("counts", self.choose, after="batch", on_host=True)
        later = [self._if_chosen("sparse", phase) for phase in self.phases[1:]]
        self.phases = (counts, *later, self._if_chosen("dense", self.dense.phases[0]))

    def calibrated(self, stopwatch: Stopwatch) -> float:
        """Return the density at which both take equal time on this machine. Collective; the same on every rank.

        The times are of the device, on a CPU of the whole exchange. They include a search on the device, for which the
        host waits. Touched rows are evenly spaced over the table, with the values that the gradient has there.
        """
        inputs, finder, table_rows = self.inputs, self.finder, self.inputs.problem.table_rows
        saved_slice, points = inputs.own_slice.clone(), []
        for density in CALIBRATED_AT:
            rows = max(1, round(density * table_rows))
            tokens = torch.arange(rows) * table_rows // rows
            self.finder = row_finder(inputs, tokens.to(torch.int32)[None])
            points.append((density, stopwatch.ms(sequence(self.phases))))
        dense_ms = stopwatch.ms(self.dense.reduce)
        self.finder = finder
        self.release()
        inputs.own_slice.copy_(saved_slice)
        if inputs.device.type == "cuda":
            torch.cuda.empty_cache()
        return equal_time(points[0], points[1], dense_ms)

    def choose(self) -> None:
        """Gather all counts and choose."""
        self.exchange_counts()
        self.chosen = "sparse" if sparse_is_faster(self.counts, self.inputs.problem.table_rows, self.limit) else "dense"

    def known_rows(self) -> Tensor | None:
        return super().known_rows() if self.chosen == "sparse" else None

    def _if_chosen(self, kind: str, phase: Phase) -> Phase:
        def run() -> None:
            if self.chosen == kind:
                phase.run()

        return Phase(phase.name, run, phase.after, phase.on_host)

    def result(self) -> Tensor:
        return super().result() if self.chosen == "sparse" else self.dense.result()

    def release(self) -> None:
        super().release()
        self.dense.release()

    def columns(self) -> dict[str, Any]:
        return {**super().columns(), "crossover_density": self.limit}


def sparse_is_faster(counts: list[list[int]], table_rows: int, limit: float) -> bool:
    """Return true if a sparse exchange of these counts is faster."""
    ranks = len(counts)
    return busiest(counts) * ranks / (ranks - 1) <= limit * table_rows


def equal_time(first: tuple[float, float], second: tuple[float, float], dense_ms: float) -> float:
    """Return the density at which a line through two (density, ms) points reaches `dense_ms`, also outside them."""
    slope = (second[1] - first[1]) / (second[0] - first[0])
    if slope <= 0:  # noise, if latency is the whole time: sparse is faster at every density or at none
        return float("inf") if first[1] <= dense_ms else 0.0
    return max(0.0, first[0] + (dense_ms - first[1]) / slope)
