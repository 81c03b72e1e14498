"""Interface of an exchange: a sequence of phases and a result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from torch import Tensor

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


class Exchange(Protocol):
    """A variant on one rank. After all phases ran in order, `result` returns this rank's slice."""

    phases: tuple[Phase, ...]
    overwrites: Tensor | None
    """The part of the gradient that the exchange overwrites, if any."""

    def result(self) -> Tensor:
        """Return this rank's slice of the mean gradient, (rows_per_rank, width) in the gradient's dtype."""

    def release(self) -> None:
        """Free the memory of the last iteration."""

    def expected_bytes(self) -> list[int]:
        """Return the bytes that each rank should have sent in the last iteration, by formula."""

    def columns(self) -> dict[str, Any]:
        """Return row columns that describe the last iteration. `chosen`: dense or sparse."""

    def known_rows(self) -> Tensor | None:
        """Return the rows that the last iteration took as touched, or None if it sent the whole table."""
