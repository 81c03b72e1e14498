"""Dense or sparse, each step anew: by the rows of the busiest rank, against a limit measured at the start."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpbench.measure.stopwatch import Stopwatch
from tpbench.workloads.embedding_grad import crossover, traffic
from tpbench.workloads.embedding_grad.all_to_all import SparseAllToAll
from tpbench.workloads.embedding_grad.dense import DenseReduceScatter
from tpbench.workloads.embedding_grad.exchange import Phase, sequence
from tpbench.workloads.embedding_grad.index import EvenlySpread
from tpbench.workloads.embedding_grad.inputs import Inputs
from tpbench.workloads.embedding_grad.wire import Wire

CALIBRATED_AT = (0.2, 0.8)
"""Densities at which the sparse exchange is timed: a line through them is within a percent or two of it in between."""

UNKNOWN = -1
"""The count of a rank that does not know its rows."""


class SparseAuto:
    """All ranks gather all counts, so that all know the busiest rank's rows and choose alike without asking."""

    def __init__(
        self, inputs: Inputs, wire: Wire, dense: DenseReduceScatter, sparse: SparseAllToAll, limit: float
    ) -> None:
        """`limit`: the density, or the busiest rank's equal of it, above which dense is faster."""
        self.inputs, self.wire, self.dense, self.sparse, self.limit = inputs, wire, dense, sparse, limit
        self.writes = sparse.writes
        self.goes_sparse = False
        later = [self._if(True, phase) for phase in sparse.phases[1:]] + [self._if(False, dense.phases[0])]
        self.phases = (Phase("counts", self.choose, after="batch", on_host=True), *later)

    def choose(self) -> None:
        """Everybody's counts, and what they say."""
        found = self.sparse.index.find()
        mine = found.counts if found is not None else [UNKNOWN] * self.wire.world_size
        counts = self.wire.gather_counts(mine)
        self.goes_sparse = pays(counts, self.inputs.problem.table_rows, self.limit)
        if self.goes_sparse:
            assert found is not None
            rank = self.inputs.rank
            self.sparse.begin(found, [0 if each == rank else row[rank] for each, row in enumerate(counts)])

    def _if(self, sparse: bool, phase: Phase) -> Phase:
        def run() -> None:
            if self.goes_sparse == sparse:
                phase.run()

        return Phase(phase.name, run, phase.after, phase.on_host)

    @property
    def _chosen(self) -> DenseReduceScatter | SparseAllToAll:
        return self.sparse if self.goes_sparse else self.dense

    def result(self) -> Tensor:
        return self._chosen.result()

    def release(self) -> None:
        self.dense.release()
        self.sparse.release()

    def formula(self) -> list[int]:
        """The chosen one's, but that each rank sends all its counts to each peer."""
        peers = self.wire.world_size - 1
        gathered = traffic.COUNT_BYTES * self.wire.world_size * peers
        once = traffic.COUNT_BYTES * peers if self.goes_sparse else 0
        return [each + gathered - once for each in self._chosen.formula()]

    def facts(self) -> dict[str, Any]:
        return {**self._chosen.facts(), "crossover_density": self.limit}

    def known_rows(self) -> Tensor | None:
        return self._chosen.known_rows()


def pays(counts: list[list[int]], table_rows: int, limit: float) -> bool:
    """Whether a sparse exchange of these counts is faster; it is not to be had where a rank does not know its rows."""
    if any(UNKNOWN in row for row in counts):
        return False
    ranks = len(counts)
    return traffic.busiest(counts) * ranks / (ranks - 1) <= limit * table_rows


def calibrate(inputs: Inputs, dense: DenseReduceScatter, sparse: SparseAllToAll, stopwatch: Stopwatch) -> float:
    """The density at which both take equal time on this machine. Collective; the same on every rank.

    Timed is what the device does, on a CPU everything: the numbers are spread over the table, the values as they are.
    """
    kept = inputs.own.clone()
    index = sparse.index
    points = []
    for density in CALIBRATED_AT:
        rows = max(1, round(density * inputs.problem.table_rows))
        sparse.index = EvenlySpread(inputs.owners, inputs.rank, inputs.device, rows)
        points.append((density, stopwatch.ms(sequence(sparse.phases))))
    dense_ms = stopwatch.ms(dense.reduce)
    sparse.index = index
    sparse.release()
    dense.release()
    inputs.own.copy_(kept)
    if inputs.device.type == "cuda":
        torch.cuda.empty_cache()
    return crossover.from_line(points[0], points[1], dense_ms)
