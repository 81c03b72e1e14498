"""A predicted number with its error bar."""

from __future__ import annotations

from dataclasses import dataclass

LARGEST_ERROR = 0.5
"""A number with a larger relative error is called unknown."""


@dataclass(frozen=True)
class Estimate:
    """A number with its error bar."""

    value: float
    error: float
    """As a share of the value."""

    @property
    def low(self) -> float:
        return self.value / (1 + self.error)

    @property
    def high(self) -> float:
        return self.value * (1 + self.error)

    @property
    def known(self) -> bool:
        """False if the error bar is so wide that the value says nothing."""
        return self.error <= LARGEST_ERROR
