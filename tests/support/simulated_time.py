"""Time that passes only where a test says so: measured times are then exact on a machine of any load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from tpbench.measure import late, stop_rules, timers


class SimulatedTime:
    """The part of the module `time` that measurements use."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def perf_counter(self) -> float:
        return self.now_s

    monotonic = perf_counter


class FakeEvents:
    """CUDA events in simulated time. An event records the time at once."""

    def __init__(self, time: SimulatedTime, log: list[str]) -> None:
        self.time, self.log = time, log

    def __call__(self, enable_timing: bool = False) -> FakeEvents:
        assert enable_timing
        return FakeEvents(self.time, self.log)

    def record(self) -> None:
        self.log.append("record")
        self.at_s = self.time.now_s

    def elapsed_time(self, end: FakeEvents) -> float:
        return (end.at_s - self.at_s) * 1e3


@contextmanager
def simulated_time() -> Iterator[SimulatedTime]:
    """Give measurements on this rank a simulated time."""
    simulated = SimulatedTime()
    with ExitStack() as stack:
        for module in (timers, late, stop_rules):
            stack.enter_context(mock.patch.object(module, "time", simulated))
        yield simulated
