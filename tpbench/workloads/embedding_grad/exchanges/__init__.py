"""Exchanges of the gradient: phases and a result. Here are their base and the exchanges of the whole table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from tpbench.workloads.embedding_grad.exchanges.collectives import CountedCollectives
from tpbench.workloads.embedding_grad.inputs import EmbeddingGradInputs

StepPoint: TypeAlias = Literal["batch", "forward", "backward"]
"""Points of a training step: the batch is known, the forward pass has ended, the backward pass has ended."""


@dataclass(frozen=True)
class Phase:
    """A part of an iteration."""

    name: str
    """One of `problem.PHASES`."""
    run: Callable[[], None]
    after: StepPoint = "backward"
    """Earliest point at which the phase can run. Only phases after "backward" need the gradient."""
    on_host: bool = False
    """Measure the phase by the host's clock."""


def sequence(phases: Sequence[Phase]) -> Callable[[], None]:
    """Return a function that runs the phases in order."""

    def run() -> None:
        for phase in phases:
            phase.run()

    return run


class Exchange:
    """A variant on one rank. After all phases ran in order, `result` returns this rank's slice of the mean gradient."""

    phases: tuple[Phase, ...]
    chosen: str
    """Kind of the exchange: dense or sparse."""
    overwrites: Tensor | None = None
    """The part of the gradient that the exchange overwrites, if any."""

    def __init__(self, inputs: EmbeddingGradInputs, comm: CountedCollectives) -> None:
        self.inputs, self.comm = inputs, comm

    def result(self) -> Tensor:
        """Return (rows_per_rank, width) in the gradient's dtype: the mean gradient of this rank's rows."""
        return self.inputs.own_slice

    def release(self) -> None:
        """Free the memory of the last iteration."""

    def columns(self) -> dict[str, Any]:
        """Return row columns that describe the last iteration."""
        return {"chosen": self.chosen}


class DenseReduceScatter(Exchange):
    """Reduce-scatter: each owner gets its part of the mean, as a sharded optimizer needs it."""

    chosen = "dense"

    def __init__(self, inputs: EmbeddingGradInputs, comm: CountedCollectives) -> None:
        super().__init__(inputs, comm)
        self.output: Tensor | None = None
        self.phases = (Phase("reduce", self.reduce),)

    def reduce(self) -> None:
        """Run the collective."""
        self.output = torch.empty_like(self.inputs.own_slice)
        self.comm.reduce_scatter_mean(self.output, self.inputs.grad)

    def result(self) -> Tensor:
        assert self.output is not None
        return self.output

    def release(self) -> None:
        self.output = None


class DenseAllReduce(Exchange):
    """All-reduce in place: every rank gets the whole mean, as unsharded data parallelism needs it."""

    chosen = "dense"

    def __init__(self, inputs: EmbeddingGradInputs, comm: CountedCollectives) -> None:
        super().__init__(inputs, comm)
        self.overwrites = inputs.grad
        self.phases = (Phase("reduce", lambda: comm.all_reduce_mean(inputs.grad)),)
