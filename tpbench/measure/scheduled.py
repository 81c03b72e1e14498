"""Measurement of a session with a fixed number of iterations, such as training steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tpbench.measure import rank_memory
from tpbench.measure.clock import WallClock
from tpbench.measure.gpu import ClockWatch, this_gpu
from tpbench.measure.measured_columns import (
    clock_columns,
    cost_columns,
    iteration_columns,
    iteration_memory_columns,
    launch_samples,
    memory_columns,
    time_columns,
)
from tpbench.measure.ranks import gather_numbers
from tpbench.measure.session import CapturableSession, Context, IterationSchedule, Session, Verdict


def run_scheduled(
    session: Session,
    schedule: IterationSchedule,
    context: Context,
    wall: WallClock,
    copy_gb_per_s: float,
    say: Callable[[str], None],
) -> tuple[Verdict, dict[str, Any]]:
    """Check and time a session whose iterations depend on the ones before. Collective.

    Each iteration runs once. It is timed by wall clock and, on a GPU, by events around the same iteration: its launches
    are not queued ahead. The memory is read between iterations, outside the timed region.
    """
    pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def step_with_events() -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        session.step()
        end.record()
        pairs.append((begin, end))

    cuda = context.device.type == "cuda"
    say("warming up")
    wall.warm_up(session.step, session.restore, schedule.warmup_iterations)
    graph_gib = 0.0
    if context.graph and isinstance(session, CapturableSession):
        say("capturing a graph")
        graph_gib = session.capture()
    say("timing")
    usage = rank_memory.IterationMemory(context.device, schedule.held_before, graph_gib)

    def restore() -> None:
        usage.begin()
        session.restore()

    gpu = this_gpu(context.device)
    watch = ClockWatch(gpu)
    with watch:
        samples = wall.samples(step_with_events if cuda else session.step, restore, schedule.iterations)
    clocks = clock_columns(watch, context)
    usage.end()
    on_device = gather_numbers([begin.elapsed_time(end) for begin, end in pairs], context) if cuda else None
    say("checking")
    timed = gather_numbers(samples, context)
    launches = launch_samples(wall, len(samples), context)
    verdict = session.check()
    columns: dict[str, Any] = {
        **memory_columns(max(usage.peak_gib), context),
        **iteration_memory_columns(usage, context),
        "warmed_up": True,
        "graph": context.graph,
        **clocks,
        **cost_columns(session.costs, copy_gb_per_s),
    }
    if verdict.wrong:
        return verdict, columns
    columns = time_columns(session, context, timed, on_device, launches, columns, say)
    return verdict, columns | iteration_columns(session.step, session, wall, gpu, context, columns, say)
