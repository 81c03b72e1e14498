"""Measure one cell on one rank: first pass, check, then both clocks until the medians are precise."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any

import numpy as np
import torch

from tpbench.measure import cuda_graph, rank_memory
from tpbench.measure.audit import changed_inputs_reason, is_audited, prepare_audit, timed_result_reason
from tpbench.measure.clock import Clock, ColdCache, DeviceClock, WallClock
from tpbench.measure.gpu import SAMPLE_S, ClockWatch, this_gpu
from tpbench.measure.measured_columns import (
    cost_columns,
    iteration_columns,
    iteration_memory_columns,
    launch_samples,
    memory_columns,
    time_columns,
)
from tpbench.measure.ranks import gather_number, gather_numbers
from tpbench.measure.session import (
    CapturableSession,
    Context,
    IterationSchedule,
    MeasureSettings,
    ScheduledSession,
    Session,
    Verdict,
)
from tpbench.measure.statistics import Samples
from tpbench.measure.stop_rules import ClockRounds, RoundRequest, run_rounds, samples_until_precise

Measured = tuple[Verdict, dict[str, Any]]
"""The verdict of a session, and the columns of its row."""


def measurement(
    session: Session,
    context: Context,
    settings: MeasureSettings,
    copy_gb_per_s: float,
    interpreted: bool = False,
    interleaved: bool = False,
) -> Generator[RoundRequest, bool, Measured]:
    """Return the verdict of a session and the columns of its row. A wrong result has no time. Collective.

    The first pass compiles and fills caches. The second pass is checked, and its peak memory is stored. Then both
    clocks time further iterations. A `ScheduledSession` runs exactly the iterations of its schedule instead.

    Args:
        session: the variant, set up on this rank.
        context: this rank's place.
        settings: how long to measure, and whether with a CUDA graph or with fresh inputs.
        copy_gb_per_s: copy bandwidth of this machine in 1e9 bytes per second, for the floor.
        interpreted: True if Triton's interpreter runs the kernels. If one pass then exceeds the time budget, it is the
            only one: it is checked and its time counts (`warmed_up` is false).
        interleaved: True if the clocks run in rounds. Before each one the generator yields the cell's request; the
            answer says whether to run it (see `run_rounds`). Otherwise the generator yields nothing.

    The columns are complete on rank 0.
    """
    cache = ColdCache(context.device, context.world_size)
    wall = WallClock(context.device, cache)
    if isinstance(session, ScheduledSession):
        return run_scheduled(session, session.schedule, context, wall, copy_gb_per_s)
    settings = prepare_audit(session, settings)
    step, last_ms, peak_gib, warmed_up = _first_passes(session, context, settings, wall, interpreted)
    # One pass that takes longer than the budget is the measurement by wall clock.
    is_long = bool(last_ms.max() / 1e3 > settings.time_budget_s)
    context.say("checking")
    verdict = session.check()
    columns: dict[str, Any] = {
        **memory_columns(peak_gib, context),
        "warmed_up": warmed_up,
        "graph": settings.graph,
        "fresh": settings.fresh,
        **cost_columns(session.costs, copy_gb_per_s),
    }
    if verdict.wrong:
        return verdict, columns
    clocks: dict[str, Clock] = {"wall": wall}
    if context.device.type == "cuda":
        clocks["device"] = DeviceClock(context.device, cache)
    gpu = this_gpu(context.device)
    watch = ClockWatch(gpu)
    context.say("timing")
    if is_audited(session):
        session.fresh = settings.fresh
    wrong: str | None = None
    if interleaved and not is_long:
        rounds = {name: ClockRounds(clock, step, session, context, settings) for name, clock in clocks.items()}
        yield from run_rounds(list(rounds.values()), session, context, watch)
        samples = {name: each.samples for name, each in rounds.items()}
        names = {"wall": "round_ms", "device": "device_round_ms"}
        columns |= {names[name]: each.medians_ms for name, each in rounds.items()}
    else:
        samples, wrong = _time_each_clock(clocks, step, session, context, settings, watch, last_ms if is_long else None)
    launches = launch_samples(wall, len(samples["wall"]), context)
    columns |= watch.columns(context)
    if is_audited(session):
        session.fresh = False
        # On a CPU a long pass is not repeated.
        if not wrong and (not is_long or context.device.type == "cuda"):
            context.say("checking an iteration on changed inputs")
            wrong = changed_inputs_reason(session, step, context)
        session.keeps_output = False
    if wrong:
        return Verdict(verdict.columns, wrong), columns
    columns = time_columns(session, context, samples["wall"], samples.get("device"), launches, columns)
    energy_s = min(SAMPLE_S, settings.time_budget_s)
    return verdict, columns | iteration_columns(step, session, wall, gpu, context, columns, energy_s)


def _first_passes(
    session: Session, context: Context, settings: MeasureSettings, wall: WallClock, interpreted: bool
) -> tuple[Callable[[], None], np.ndarray[Any, Any], float, bool]:
    """Run the first pass and the one that is checked, and capture the CUDA graph if one is asked for.

    Returns the function that the clocks time (the session's step, or the replay of its graph), the wall time of the
    last pass on every rank in ms, the peak memory of the pass that is checked on this rank in GiB, and whether a pass
    ran before that one.
    """

    def one_pass(step: Callable[[], None]) -> tuple[np.ndarray[Any, Any], float]:
        with rank_memory.extra_peak(context.device) as peak:
            samples = wall.samples(step, session.restore, 1)
        return np.array(gather_number(samples[0], context)), peak.peak_gib[0]

    context.say("first pass")
    last_ms, peak_gib = one_pass(session.step)
    if interpreted and last_ms.max() / 1e3 > settings.time_budget_s:
        return session.step, last_ms, peak_gib, False
    session.release()
    rank_memory.fill_freed_with_nan(context.device, peak_gib)
    context.say("second pass")
    last_ms, peak_gib = one_pass(session.step)
    if not settings.graph:
        return session.step, last_ms, peak_gib, True
    context.say("capturing a graph")
    step = _captured(session)  # replays fill the output that the capture left in the session
    if is_audited(session):
        session.keeps_output = True
    return step, one_pass(step)[0], peak_gib, True


def _captured(session: Session) -> Callable[[], None]:
    """Return the step as the replay of a CUDA graph. The session's output is filled by the first replay."""

    def one_pass() -> None:
        session.restore()
        session.step()

    session.release()
    cuda_graph.warm_up(one_pass)
    session.release()
    return cuda_graph.capture(session.step).replay


def _time_each_clock(
    clocks: Mapping[str, Clock],
    step: Callable[[], None],
    session: Session,
    context: Context,
    settings: MeasureSettings,
    watch: ClockWatch,
    long_pass_ms: np.ndarray[Any, Any] | None,
) -> tuple[dict[str, Samples], str | None]:
    """Time with one clock after the other, and check the result of the last iteration of each. Collective.

    `long_pass_ms`: the sample of the wall clock, which then does not run. Returns the samples, and why a result is
    wrong, or None.
    """
    samples: dict[str, Samples] = {}
    wrong: str | None = None
    for name, clock in clocks.items():
        if name == "wall" and long_pass_ms is not None:
            samples[name] = [long_pass_ms]
            continue
        with watch:
            samples[name] = samples_until_precise(clock, step, session, context, settings)
        if is_audited(session):
            reason = timed_result_reason(session, name)
            wrong = wrong or reason
    return samples, wrong


def run_scheduled(
    session: Session, schedule: IterationSchedule, context: Context, wall: WallClock, copy_gb_per_s: float
) -> Measured:
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
    context.say("warming up")
    wall.warm_up(session.step, session.restore, schedule.warmup_iterations)
    graph_gib = 0.0
    if context.graph and isinstance(session, CapturableSession):
        context.say("capturing a graph")
        graph_gib = session.capture()
    context.say("timing")
    usage = rank_memory.IterationMemory(context.device, schedule.held_before, graph_gib)

    def restore() -> None:
        usage.begin()
        session.restore()

    gpu = this_gpu(context.device)
    watch = ClockWatch(gpu)
    with watch:
        samples = wall.samples(step_with_events if cuda else session.step, restore, schedule.iterations)
    clocks = watch.columns(context)
    usage.end()
    on_device = gather_numbers([begin.elapsed_time(end) for begin, end in pairs], context) if cuda else None
    context.say("checking")
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
    columns = time_columns(session, context, timed, on_device, launches, columns)
    return verdict, columns | iteration_columns(session.step, session, wall, gpu, context, columns)
