"""Measure one cell on one rank: first pass, check, both clocks until the medians are precise, and a row's columns.

Columns about the GPUs of a cell are missing on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any

import numpy as np
import torch

from tpbench.measure import cuda_graph, rank_memory
from tpbench.measure.audit import changed_inputs_reason, is_audited, prepare_audit, timed_result_reason
from tpbench.measure.clock import Clock, ColdCache, DeviceClock, WallClock
from tpbench.measure.gpu import SAMPLE_S, ClockWatch, NvmlGpu, iteration_energy_j, this_gpu
from tpbench.measure.gpu_trace import bottleneck_columns
from tpbench.measure.ranks import gather_number, gather_numbers
from tpbench.measure.session import (
    CapturableSession,
    Context,
    Costs,
    DetailedSession,
    IterationSchedule,
    MeasureSettings,
    ScheduledSession,
    Session,
    Verdict,
)
from tpbench.measure.statistics import Samples, summary
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
        "iteration_held_gib": [float(ranks.max()) for ranks in gather_numbers(usage.held_gib, context)],
        "iteration_peak_gib": [float(ranks.max()) for ranks in gather_numbers(usage.peak_gib, context)],
        "warmed_up": True,
        "graph": context.graph,
        **clocks,
        **cost_columns(session.costs, copy_gb_per_s),
    }
    if verdict.wrong:
        return verdict, columns
    columns = time_columns(session, context, timed, on_device, launches, columns)
    return verdict, columns | iteration_columns(session.step, session, wall, gpu, context, columns)


def memory_columns(peak_gib: float, context: Context) -> dict[str, Any]:
    """Return the peak memory of every rank. Collective."""
    peaks = gather_number(peak_gib, context)
    return {"rank_peak_gib": peaks, "peak_gib": max(peaks)}


def cost_columns(costs: Costs, copy_gb_per_s: float) -> dict[str, Any]:
    """Return the unavoidable costs of an iteration and their time on this machine, the floor.

    floor_ms = max(bytes_moved / copy_gb_per_s + wire_ms, compute_ms): memory traffic and communication, or products.
    If they can only run one after the other, it is their sum. With `wire_beside_memory` the longer of memory traffic
    and communication counts, not both. Without counted bytes there is no floor.
    """
    columns = {"bytes_communicated": costs.bytes_communicated, "copy_gb_per_s": copy_gb_per_s}
    if costs.bytes_moved is None:
        return columns
    moving_ms = costs.bytes_moved / copy_gb_per_s / 1e6
    memory_ms = max(moving_ms, costs.wire_ms) if costs.wire_beside_memory else moving_ms + costs.wire_ms
    return columns | {
        "bytes_moved": costs.bytes_moved,
        "flops": costs.flops,
        "floor_ms": memory_ms + costs.compute_ms if costs.consecutive else max(memory_ms, costs.compute_ms),
    }


def time_columns(
    session: object,
    context: Context,
    wall: Samples,
    on_device: Samples | None,
    launches: Samples | None,
    columns: dict[str, Any],
) -> dict[str, Any]:
    """Return `columns` (those so far) with the times, the fraction of the floor and the session's details.

    time_ms, device_ms and launch_ms are medians over iterations of the maximum over ranks. A CPU has neither device
    samples (`on_device`) nor launches. The fraction of the floor and the bandwidth use device_ms where there are device
    samples, else time_ms. Collective if the session has details.
    """
    columns = columns | _clock_columns(wall, "time", "samples_ms")
    columns["iterations"] = len(wall)
    columns["skew_ms"] = float(np.median([ranks.max() - ranks.min() for ranks in wall]))
    best_ms = columns["time_ms"]
    if on_device is not None:
        columns |= _clock_columns(on_device, "device", "device_samples_ms")
        best_ms = columns["device_ms"]
    if launches is not None:
        columns["launch_ms"] = float(np.median([ranks.max() for ranks in launches]))
    if "floor_ms" in columns:
        columns["fraction_of_floor"] = columns["floor_ms"] / best_ms
        columns["gb_per_s"] = columns["bytes_moved"] / best_ms / 1e6
    if isinstance(session, DetailedSession):
        context.say("timing details")
        columns |= session.details(columns)
    return columns


def _clock_columns(samples: Samples, prefix: str, samples_column: str) -> dict[str, Any]:
    slowest = [float(ranks.max()) for ranks in samples]
    return {**summary(slowest, prefix), samples_column: slowest}


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
    gpu: NvmlGpu | None,
    context: Context,
    columns: dict[str, Any],
    energy_s: float = SAMPLE_S,
) -> dict[str, Any]:
    """Return the bottleneck and the energy of an iteration, from further iterations. Collective.

    `step`: one iteration as it was timed. `columns`: those of the timed iterations. `energy_s`: duration of the
    iterations whose energy is measured.
    """
    if context.device.type != "cuda":
        return {}
    context.say("tracing")
    result = bottleneck_columns(step, session, wall, context, columns)
    context.say("measuring energy")

    def iteration() -> None:
        session.restore()
        wall.line_up()
        step()

    energy_j = iteration_energy_j(iteration, columns["time_ms"], gpu, context, energy_s)
    return result if energy_j is None else {**result, "energy_j": energy_j}
