"""What an exchange is: phases that follow each other, and a result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from torch import Tensor

After: TypeAlias = Literal["batch", "forward", "backward"]
"""The points of a training step: its batch is known, its forward pass is over, its gradient is there."""


@dataclass(frozen=True)
class Phase:
    """A part of an iteration."""

    name: str
    """One of `problem.PHASES`."""
    run: Callable[[], None]
    after: After = "backward"
    """From which point on it is done: all but "backward" need no gradient."""
    on_host: bool = False
    """Its time is the host's."""


def sequence(phases: Sequence[Phase]) -> Callable[[], None]:
    """Runs them in their order."""

    def run() -> None:
        for phase in phases:
            phase.run()

    return run


class Exchange(Protocol):
    """A variant on one rank: after its phases ran in their order, `result` is this rank's slice."""

    phases: tuple[Phase, ...]
    writes: Tensor | None
    """The part of the gradient that it writes over, if any."""

    def result(self) -> Tensor:
        """(rows_each, width) in the gradient's dtype: the mean gradient of this rank's rows, padding included."""

    def release(self) -> None:
        """Let go of the memory of the last iteration."""

    def formula(self) -> list[int]:
        """Bytes that each rank should have sent in the last iteration."""

    def facts(self) -> dict[str, Any]:
        """Columns that it knows of the last iteration. `chosen`: dense or sparse."""

    def known_rows(self) -> Tensor | None:
        """The rows that the last iteration was told of, or None where it needs to be told of none."""
