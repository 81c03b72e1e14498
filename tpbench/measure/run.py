"""The measurement of one cell on one rank: first pass, check, then the clocks until the medians are known."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tpbench.measure import memory
from tpbench.measure.clock import Clock, ColdCache, DeviceClock, WallClock
from tpbench.measure.columns import cost_columns, memory_columns, time_columns
from tpbench.measure.interleaving import TurnTaker
from tpbench.measure.ranks import of_all
from tpbench.measure.rounds import Series, take_turns, timed
from tpbench.measure.scheduled import run_scheduled
from tpbench.measure.session import Context, Scheduled, Session, Verdict
from tpbench.measure.settings import MeasureSettings
from tpbench.measure.statistics import precise_enough

WARMUP_ITERATIONS = 3
FIRST_BLOCK = 5


def run(
    session: Session,
    context: Context,
    settings: MeasureSettings,
    copy_gb_per_s: float,
    say: Callable[[str], None],
    interpreted: bool = False,
    turns: TurnTaker | None = None,
) -> tuple[Verdict, dict[str, Any]]:
    """Check and time a session. Collective; the columns are complete on rank 0.

    Nothing that is wrong has a time. A first pass compiles and fills caches; the second is the one that is checked and
    whose memory is watched. Where the kernels are interpreted and one pass takes longer than the whole time budget, it
    is warm-up, check and time in one, and the row says so (`warmed_up` false). With `turns` the clocks run in rounds,
    between which other cells have theirs. A `Scheduled` session runs just the iterations of its schedule.
    """
    cache = ColdCache(context.device, context.world_size)
    wall = WallClock(context.device, cache)
    if isinstance(session, Scheduled):
        return run_scheduled(session, session.schedule, context, wall, copy_gb_per_s, say)
    say("first pass")
    step = session.step

    def one_pass() -> tuple[np.ndarray[Any, Any], float]:
        with memory.extra_peak(context.device) as peak:
            mine = wall.samples(step, session.restore, 1)
        return np.array(of_all(mine[0], context)), peak.gib

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
        **memory_columns(peak_gib, context),
        "warmed_up": warm,
        "graph": settings.graph,
        **cost_columns(session.costs, copy_gb_per_s),
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
    on_device = taken[1] if context.device.type == "cuda" else None
    return verdict, time_columns(session, context, taken[0], on_device, columns, say)


def _until_known(
    clock: Clock, step: Callable[[], None], session: Session, context: Context, settings: MeasureSettings
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


def _next_block(taken: Sequence[np.ndarray[Any, Any]], spent_s: float, settings: MeasureSettings) -> int:
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
