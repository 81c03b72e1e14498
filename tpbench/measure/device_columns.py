"""Columns about the GPUs of a cell: their clocks, the launches, the bottleneck and the energy of an iteration. A CPU
has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tpbench.measure import gpu_profiler
from tpbench.measure.bottleneck import bottleneck_columns, columns_by_clocks
from tpbench.measure.clock import WallClock
from tpbench.measure.columns import Samples
from tpbench.measure.energy import SAMPLE_S, iteration_energy_j
from tpbench.measure.gpu import THROTTLE_REASONS, ClockWatch, Gpu
from tpbench.measure.ranks import gather_number, gather_numbers
from tpbench.measure.session import Context, ScheduledSession, Session

NOT_THROTTLED = "none"
"""Value of the column `throttle_reasons` if the clocks of no rank were lowered."""

MOST_IDLE_OF_REPLAY = 0.5
"""Idle share above which the trace of a long CUDA graph is incomplete: its kernels follow each other without the host.
Seen on two H200s with the copies of `fsdp_dtensor_async`, torch 2.11."""


def clock_columns(watch: ClockWatch, context: Context) -> dict[str, Any]:
    """Return the clocks of rank 0 after the timed iterations, and why those of any rank were lowered. Collective."""
    if context.device.type != "cuda":
        return {}
    reasons = watch.reasons()
    bits = -1 if reasons is None else sum(1 << at for at, each in enumerate(THROTTLE_REASONS) if each in reasons)
    on_ranks = [int(each) for each in gather_number(bits, context)]
    if min(on_ranks) < 0:
        return watch.clocks_mhz
    found = [each for at, each in enumerate(THROTTLE_REASONS) if any(bits >> at & 1 for bits in on_ranks)]
    return watch.clocks_mhz | {"throttle_reasons": " ".join(found) or NOT_THROTTLED}


def launch_samples(wall: WallClock, iterations: int, context: Context) -> Samples | None:
    """Return the host time in ms of the last iterations, from the call of the step until it returned. Collective.

    The time includes waits for the device within the step. With a CUDA graph the step is its replay. The result is None
    on a CPU: there the call itself computes, so that its time is not one of launches.
    """
    return gather_numbers(wall.launches_ms[-iterations:], context) if context.device.type == "cuda" else None


def iteration_columns(
    step: Callable[[], None],
    session: Session,
    wall: WallClock,
    gpu: Gpu | None,
    context: Context,
    columns: dict[str, Any],
    say: Callable[[str], None],
    energy_s: float = SAMPLE_S,
) -> dict[str, Any]:
    """Return the bottleneck and the energy of an iteration, from further iterations. Collective.

    `step`: one iteration as it was timed. `columns`: those of the timed iterations. `energy_s`: duration of the
    iterations whose energy is measured.
    """
    if context.device.type != "cuda":
        return {}
    say("tracing")
    # A profiled process ends after its job. A schedule is traced all the same: nothing else shows its gaps, and a new
    # process costs little beside it. So is a process that the workload has profiled already. All ranks decide alike.
    may_trace = not context.process_stays or (isinstance(session, ScheduledSession) and session.schedule.traced)
    may_trace = may_trace or max(gather_number(gpu_profiler.has_run(), context)) > 0
    compute_ms = session.costs.compute_ms
    result = bottleneck_columns(step, session.restore, wall, context, columns, compute_ms) if may_trace else {}
    if context.graph and isinstance(session, ScheduledSession) and result.get("idle_share", 0.0) > MOST_IDLE_OF_REPLAY:
        say(f"no shares: the trace has little of a replay (idle for {result['idle_share']:.0%} of it)")
        result = {}
    result = result or columns_by_clocks(session, columns)
    say("measuring energy")

    def prepare() -> None:
        session.restore()
        wall.line_up()

    energy_j = iteration_energy_j(step, prepare, columns["time_ms"], gpu, context, energy_s)
    return result if energy_j is None else {**result, "energy_j": energy_j}
