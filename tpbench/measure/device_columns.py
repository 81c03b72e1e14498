"""Columns about the GPUs of a cell: their clocks, the bottleneck of an iteration, and its energy. A CPU has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tpbench.measure import gpu_profiler
from tpbench.measure.bottleneck import bottleneck_columns, columns_by_clocks
from tpbench.measure.clock import WallClock
from tpbench.measure.energy import iteration_energy_j
from tpbench.measure.gpu import THROTTLE_REASONS, Gpu, ThrottleWatch
from tpbench.measure.ranks import gather_number
from tpbench.measure.session import Context, Session

NOT_THROTTLED = "none"
"""Value of the column `throttle_reasons` if the clocks of no rank were lowered."""


def clock_columns(gpu: Gpu | None, watch: ThrottleWatch, context: Context) -> dict[str, Any]:
    """Return the clocks of rank 0's GPU, before they can change, and why a rank's clocks were lowered. Collective."""
    clocks = gpu.clocks_mhz() if gpu else {}
    if context.device.type != "cuda":
        return {}
    reasons = watch.reasons()
    bits = -1 if reasons is None else sum(1 << at for at, each in enumerate(THROTTLE_REASONS) if each in reasons)
    on_ranks = [int(each) for each in gather_number(bits, context)]
    if min(on_ranks) < 0:
        return clocks
    found = [each for at, each in enumerate(THROTTLE_REASONS) if any(bits >> at & 1 for bits in on_ranks)]
    return clocks | {"throttle_reasons": " ".join(found) or NOT_THROTTLED}


def iteration_columns(
    step: Callable[[], None],
    session: Session,
    wall: WallClock,
    gpu: Gpu | None,
    context: Context,
    columns: dict[str, Any],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Return the bottleneck and the energy of an iteration, from further iterations. Collective.

    `step`: one iteration as it was timed. `columns`: those of the timed iterations.
    """
    if context.device.type != "cuda":
        return {}
    say("tracing")
    # The workload may have profiled some of the ranks already. All ranks must decide alike.
    may_trace = not context.process_stays or max(gather_number(gpu_profiler.has_run(), context)) > 0
    compute_ms = session.costs.compute_ms
    result = bottleneck_columns(step, session.restore, wall, context, columns, compute_ms) if may_trace else {}
    result = result or columns_by_clocks(session, columns)
    say("measuring energy")

    def prepare() -> None:
        session.restore()
        wall.line_up()

    energy_j = iteration_energy_j(step, prepare, columns["time_ms"], gpu, context)
    return result if energy_j is None else {**result, "energy_j": energy_j}
