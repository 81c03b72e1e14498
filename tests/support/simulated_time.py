"""Time that passes only where a test says so: measured times are then exact on a machine of any load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from tpbench.measure import clock, rounds, run


class SimulatedTime:
    """The part of the module `time` that measurements use."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def perf_counter(self) -> float:
        return self.now_s

    monotonic = perf_counter


@contextmanager
def simulated_time() -> Iterator[SimulatedTime]:
    """Give measurements on this rank a simulated time."""
    simulated = SimulatedTime()
    with ExitStack() as stack:
        for module in (clock, rounds, run):
            stack.enter_context(mock.patch.object(module, "time", simulated))
        yield simulated
