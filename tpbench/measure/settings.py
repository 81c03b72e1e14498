"""Settings of a measurement: part of a job, passed to the clocks."""

from __future__ import annotations

from dataclasses import dataclass

from tpbench.settings import setting


@dataclass(frozen=True)
class MeasureSettings:
    """How long and how exactly to measure."""

    measure: str = setting("default", help="name of the settings")
    time_budget_s: float = setting(3.0, help="seconds each clock may take", low=0.0)
    min_iterations: int = setting(20, help="iterations before the interval may stop a clock", low=1)
    max_iterations: int = setting(1000, help="iterations after which a clock stops", low=1)
    precision: float = setting(0.01, help="wanted 95% interval of the median, as a share of it", low=0.0)
    graph: bool = setting(False, help="time the replay of a CUDA graph")
