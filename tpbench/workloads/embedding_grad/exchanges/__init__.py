"""Exchanges of the gradient: phases and a result."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from torch import Tensor

from tpbench.measure.timers import Stopwatch
from tpbench.workloads.embedding_grad.exchanges.counted import CountedCollectives
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


@dataclass(frozen=True)
class ExchangeContext:
    """Arguments of a variant besides the problem."""

    inputs: EmbeddingGradInputs
    comm: CountedCollectives
    stopwatch: Stopwatch
    link_rates: dict[str, float] = field(default_factory=dict)
    other_work: Any = None
    """The `TrainingStep` around the exchange. None: an iteration is the exchange alone."""


class Exchange:
    """A variant on one rank. After all phases ran in order, `result` returns this rank's slice of the mean gradient."""

    phases: tuple[Phase, ...]
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
        return {}
