"""The measurement of one cell on one rank: first pass, check, then the clocks until the medians are known."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tpbench.context import Context, Costs, Detailed, Scheduled, Session, Verdict
from tpbench.job import Measure
from tpbench.measure import memory
from tpbench.measure.clock import Clock, ColdCache, DeviceClock, WallClock
from tpbench.measure.rounds import Series, take_turns, timed
from tpbench.measure.statistics import precise_enough, summary
from tpbench.turns import TurnTaker

WARMUP_ITERATIONS = 3
FIRST_BLOCK = 5


def run(
    session: Session,
    context: Context,
    settings: Measure,
    copy_gb_per_s: float,
    say: Callable[[str], None],
    interpreted: bool = False,
    turns: TurnTaker | None = None,
) -> tuple[Verdict, dict[str, Any]]:
    """Check and time a session. Collective; the columns are complete on rank 0.

    Nothing that is wrong has a time. A first pass compiles and fills caches; the second is the one that is checked and
    whose memory is watched. Where the kernels are interpreted and one pass takes longer than the whole time budget, it
    is warm-up, check and time in one, and the row says so (`warmed_up` false). With `turns` the clocks run in rounds,
    between which other cells have theirs. A `Scheduled` session runs just the iterations that it names.
    """
    cache = ColdCache(context.device, context.world_size)
    wall = WallClock(context.device, cache)
    if isinstance(session, Scheduled):
        return _scheduled(session, context, wall, copy_gb_per_s, say)
    say("first pass")
    step = session.step

    def one_pass() -> tuple[np.ndarray[Any, Any], float]:
        with memory.extra_peak(context.device) as peak:
            mine = wall.samples(step, session.restore, 1)
        return np.array(_from_all(mine[0], context)), peak.gib

    single, peak_gib = one_pass()
    warm = not interpreted or bool(single.max() / 1e3 <= settings.time_budget_s)
    if warm:
        session.release()
        memory.spoil(context.device, peak_gib)
        say("second pass")
        single, peak_gib = one_pass()
        if settings.graph:
            say("capturing a graph")
            step = _captured(session, context)  # its replays fill the output that the capture left in the session
            single, _ = one_pass()
    say("checking")
    verdict = session.check()
    columns: dict[str, Any] = {
        **_memory_columns(peak_gib, context),
        "warmed_up": warm,
        "graph": settings.graph,
        **_cost_columns(session.costs, copy_gb_per_s),
    }
    if verdict.wrong:
        return verdict, columns
    say("timing")
    in_one_pass = single.max() / 1e3 > settings.time_budget_s
    clocks: list[Clock] = [wall, *([DeviceClock(context.device, cache)] if context.device.type == "cuda" else [])]
    if turns is not None and not in_one_pass:
        series = [Series(clock, step, session, context, settings) for clock in clocks]
        take_turns(turns, series, session, context)
        taken = [each.samples for each in series]
        columns |= dict(zip(("round_ms", "device_round_ms"), (each.medians_ms for each in series), strict=False))
    else:
        taken = [
            [single] if in_one_pass and clock is wall else _until_known(clock, step, session, context, settings)
            for clock in clocks
        ]
    columns |= _wall_columns(taken[0])
    on_device = taken[1] if context.device.type == "cuda" else None
    return verdict, _finished(session, context, columns, on_device, say)


def _scheduled(
    session: Any, context: Context, wall: WallClock, copy_gb_per_s: float, say: Callable[[str], None]
) -> tuple[Verdict, dict[str, Any]]:
    """A session that says how many iterations there are: each is timed once, by wall and, on a GPU, by events around
    the same iteration (its launches are not queued ahead). The memory watched is that of the timed ones."""
    pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def between_events() -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        session.step()
        end.record()
        pairs.append((begin, end))

    cuda = context.device.type == "cuda"
    say("warming up")
    wall.samples(session.step, session.restore, session.warmup_iterations)
    say("timing")
    with memory.extra_peak(context.device, session.held_before) as peak:
        mine = wall.samples(between_events if cuda else session.step, session.restore, session.iterations)
    on_device = _by_rank([begin.elapsed_time(end) for begin, end in pairs], context) if cuda else None
    say("checking")
    verdict: Verdict = session.check()
    columns: dict[str, Any] = {
        **_memory_columns(peak.gib, context),
        "warmed_up": True,
        "graph": False,
        **_cost_columns(session.costs, copy_gb_per_s),
    }
    if verdict.wrong:
        return verdict, columns
    columns |= _wall_columns(_by_rank(mine, context))
    return verdict, _finished(session, context, columns, on_device, say)


def _finished(
    session: Session | Scheduled,
    context: Context,
    columns: dict[str, Any],
    on_device: Sequence[np.ndarray[Any, Any]] | None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The columns with device times, where there are any, and what follows from the best time."""
    best_ms = columns["time_ms"]
    if on_device is not None:
        columns |= _clock_columns(on_device, "device", "device_samples_ms")
        columns |= _clocks_mhz(context.device)
        best_ms = columns["device_ms"]
    columns["fraction_of_floor"] = columns["floor_ms"] / best_ms
    columns["gb_per_s"] = columns["bytes_moved"] / best_ms / 1e6
    if isinstance(session, Detailed):
        say("timing details")
        columns |= session.details(columns)
    return columns


def _until_known(
    clock: Clock, step: Callable[[], None], session: Session, context: Context, settings: Measure
) -> list[np.ndarray[Any, Any]]:
    """Blocks of iterations until the median is known well enough or the budget is spent: each iteration's time on every
    rank. Rank 0 decides the size of each block and everybody hears of it before the block, so that all make the same
    number of collectives."""
    clock.samples(step, session.restore, WARMUP_ITERATIONS)
    taken: list[np.ndarray[Any, Any]] = []
    began = time.monotonic()
    while block := _agreed(_next_block(taken, time.monotonic() - began, settings)):
        taken += timed(clock, step, session, block, context)
    return taken


def _by_rank(mine: Sequence[float], context: Context) -> list[np.ndarray[Any, Any]]:
    """Each iteration's time on every rank."""
    samples = torch.tensor(mine, dtype=torch.float64)
    everyone = [torch.empty_like(samples) for _ in range(context.world_size)]
    dist.all_gather(everyone, samples)
    return list(torch.stack(everyone, dim=1).numpy())


def _next_block(taken: Sequence[np.ndarray[Any, Any]], spent_s: float, settings: Measure) -> int:
    """Iterations of the next block, 0 to stop."""
    count = len(taken)
    if count == 0:
        return min(FIRST_BLOCK, settings.max_iterations)
    left = settings.max_iterations - count
    if left <= 0 or spent_s >= settings.time_budget_s:
        return 0
    if count >= settings.min_iterations and precise_enough([each.max() for each in taken], settings.precision):
        return 0
    affordable = int((settings.time_budget_s - spent_s) / (spent_s / count))
    return max(1, min(left, affordable, max(count, settings.min_iterations - count)))


def _agreed(block: int) -> int:
    decided = torch.tensor(block)
    dist.broadcast(decided, src=0)
    return int(decided)


def _captured(session: Session, context: Context) -> Callable[[], None]:
    """The step as the replay of a CUDA graph (captured after warm-up passes on a side stream, as torch asks).

    Nothing runs in a capture: the session holds an output that is not there until the first replay.
    """
    session.release()
    side = torch.cuda.Stream(context.device)
    side.wait_stream(torch.cuda.current_stream(context.device))
    with torch.cuda.stream(side):
        for _ in range(WARMUP_ITERATIONS):
            session.restore()
            session.step()
    torch.cuda.current_stream(context.device).wait_stream(side)
    session.release()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        session.step()
    return graph.replay


def _wall_columns(samples: Sequence[np.ndarray[Any, Any]]) -> dict[str, Any]:
    skew = float(np.median([each.max() - each.min() for each in samples]))
    return {**_clock_columns(samples, "time", "samples_ms"), "iterations": len(samples), "skew_ms": skew}


def _memory_columns(peak_gib: float, context: Context) -> dict[str, Any]:
    peaks = _from_all(peak_gib, context)
    return {"rank_peak_gib": peaks, "peak_gib": max(peaks)}


def _clock_columns(samples: Sequence[np.ndarray[Any, Any]], prefix: str, raw: str) -> dict[str, Any]:
    slowest = [float(each.max()) for each in samples]
    return {**summary(slowest, prefix), raw: slowest}


def _cost_columns(costs: Costs, copy_gb_per_s: float) -> dict[str, Any]:
    return {
        "bytes_moved": costs.bytes_moved,
        "bytes_communicated": costs.bytes_communicated,
        "flops": costs.flops,
        "copy_gb_per_s": copy_gb_per_s,
        "floor_ms": max(costs.bytes_moved / copy_gb_per_s / 1e6 + costs.wire_ms, costs.compute_ms),
    }


def _clocks_mhz(device: torch.device) -> dict[str, Any]:
    """The clocks right after the timing, while they are still what they were."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        return {
            "sm_clock_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "memory_clock_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
        }
    except pynvml.NVMLError:
        return {}


def _from_all(value: float, context: Context) -> list[float]:
    """One number of every rank."""
    everyone = [torch.empty(1, dtype=torch.float64) for _ in range(context.world_size)]
    dist.all_gather(everyone, torch.tensor([value], dtype=torch.float64))
    return [float(each) for each in everyone]
