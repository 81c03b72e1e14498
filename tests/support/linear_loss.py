"""Problems and contexts for the tests of the linear loss."""

from typing import Any

from tests.support.entropy_loss import context as context
from tpbench.workloads.linear_loss import LinearLoss


def problem(**fields: Any) -> LinearLoss:
    """Return a small problem with a prime number of columns."""
    return LinearLoss(**{"tokens": 12, "hidden": 16, "vocab": 101, **fields})
