"""Settings of a measurement: part of a job, passed to the clocks."""

from __future__ import annotations

from dataclasses import dataclass

from tpbench.settings import setting


@dataclass(frozen=True)
class MeasureSettings:
    """How long and how exactly to measure."""

    measure: str = setting("default", help="name of these settings")
    time_budget_s: float = setting(3.0, help="seconds that each clock (wall, device) may take", low=0.0)
    min_iterations: int = setting(20, help="a clock measures at least so many iterations", low=1)
    max_iterations: int = setting(1000, help="a clock measures at most so many iterations", low=1)
    precision: float = setting(0.01, help="stop if the 95% interval of the median is within this share of it", low=0.0)
    graph: bool = setting(False, help="time the replay of a CUDA graph")
    fresh: bool = setting(False, help="change the inputs before every iteration: a stored answer is then wrong")
