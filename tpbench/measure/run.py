"""Measure one cell on one rank: first pass, check, then both clocks until the medians are precise."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tpbench.measure import cuda_graph, rank_memory
from tpbench.measure.audit import (
    changed_inputs_reason,
    is_audited,
    prepare_audit,
    refused,
    timed_result_reason,
)
from tpbench.measure.clock import Clock, ColdCache, DeviceClock, WallClock
from tpbench.measure.gpu import SAMPLE_S, ClockWatch, this_gpu
from tpbench.measure.measured_columns import (
    Samples,
    clock_columns,
    cost_columns,
    iteration_columns,
    iteration_memory_columns,
    launch_samples,
    memory_columns,
    time_columns,
)
from tpbench.measure.ranks import gather_number, gather_numbers
from tpbench.measure.rounds import ClockRounds, RoundRequest, run_rounds, timed_iterations
from tpbench.measure.session import (
    CapturableSession,
    Context,
    IterationSchedule,
    MeasureSettings,
    ScheduledSession,
    Session,
    Verdict,
)
from tpbench.measure.statistics import precise_enough

WARMUP_ITERATIONS = 3
FIRST_BLOCK = 5
"""Iterations of the first block."""


def measurement(
    session: Session,
    context: Context,
    settings: MeasureSettings,
    copy_gb_per_s: float,
    say: Callable[[str], None],
    interpreted: bool = False,
    interleaved: bool = False,
) -> Generator[RoundRequest, bool, tuple[Verdict, dict[str, Any]]]:
    """Return the verdict of a session and the columns of its row. A wrong result has no time. Collective.

    The first pass compiles and fills caches. The second pass is checked, and its peak memory is stored. Then both
    clocks time further iterations. A `ScheduledSession` runs exactly the iterations of its schedule instead.

    Args:
        session: the variant, set up on this rank.
        context: this rank's place.
        settings: how long to measure, and whether with a CUDA graph or with fresh inputs.
        copy_gb_per_s: copy bandwidth of this machine in 1e9 bytes per second, for the floor.
        say: writes a progress line.
        interpreted: True if Triton's interpreter runs the kernels. If one pass then exceeds the time budget, it is the
            only one: it is checked and its time counts (`warmed_up` is false).
        interleaved: True if the clocks run in rounds. Before each one the generator yields the cell's request; the
            answer says whether to run it (see `run_rounds`). Otherwise the generator yields nothing.

    The columns are complete on rank 0.
    """
    cache = ColdCache(context.device, context.world_size)
    wall = WallClock(context.device, cache)
    if isinstance(session, ScheduledSession):
        return run_scheduled(session, session.schedule, context, wall, copy_gb_per_s, say)
    settings = prepare_audit(session, settings)
    device_clock = DeviceClock(context.device, cache) if context.device.type == "cuda" else None
    cell = _Cell(session, context, settings, wall, device_clock)
    passes = cell.first_passes(interpreted, say)
    say("checking")
    verdict = session.check()
    columns: dict[str, Any] = {
        **memory_columns(passes.peak_gib, context),
        "warmed_up": passes.warmed_up,
        "graph": settings.graph,
        "fresh": settings.fresh,
        **cost_columns(session.costs, copy_gb_per_s),
    }
    if verdict.wrong:
        return verdict, columns
    gpu = this_gpu(context.device)
    watch = ClockWatch(gpu)
    say("timing")
    if is_audited(session):
        session.fresh = settings.fresh
    if interleaved and not passes.exceed(settings):
        timed = yield from cell.time_in_rounds(passes.step, watch)
    else:
        timed = cell.time_each_clock(passes, watch)
    launches = launch_samples(wall, len(timed.wall), context)
    columns |= timed.columns | clock_columns(watch, context)
    if reason := timed.complaint or cell.audit(passes, say):
        return refused(verdict, reason), columns
    columns = time_columns(session, context, timed.wall, timed.device, launches, columns, say)
    energy_s = min(SAMPLE_S, settings.time_budget_s)
    return verdict, columns | iteration_columns(passes.step, session, wall, gpu, context, columns, say, energy_s)


def run(
    session: Session,
    context: Context,
    settings: MeasureSettings,
    copy_gb_per_s: float,
    say: Callable[[str], None],
    interpreted: bool = False,
) -> tuple[Verdict, dict[str, Any]]:
    """Return the verdict and the columns of a `measurement` without interruption. Collective."""
    try:
        next(measurement(session, context, settings, copy_gb_per_s, say, interpreted))
    except StopIteration as end:
        verdict, columns = end.value
        return verdict, columns
    raise AssertionError("only an interleaved measurement yields")


@dataclass(frozen=True)
class _Passes:
    """The passes before the clocks start."""

    step: Callable[[], None]
    """The function that the clocks time: the session's step, or the replay of its CUDA graph."""
    last_ms: np.ndarray[Any, Any]
    """Wall time of the last pass on every rank."""
    peak_gib: float
    """Peak memory of the pass that is checked, on this rank."""
    warmed_up: bool
    """False if the pass that is checked was the first."""

    def exceed(self, settings: MeasureSettings) -> bool:
        """Return True if one pass takes longer than the time budget. Its wall time then is the measurement."""
        return bool(self.last_ms.max() / 1e3 > settings.time_budget_s)


@dataclass(frozen=True)
class _Timed:
    """The timed iterations."""

    samples: Sequence[Samples]
    """The samples of each clock. The wall clock comes first, then, on a GPU, the device clock."""
    columns: dict[str, Any]
    """The medians of the rounds, if the clocks ran in rounds."""
    complaint: str | None
    """Why the result of a clock's last iteration is wrong, or None."""

    @property
    def wall(self) -> Samples:
        """The wall times."""
        return self.samples[0]

    @property
    def device(self) -> Samples | None:
        """The device times. None on a CPU."""
        return self.samples[1] if len(self.samples) > 1 else None


@dataclass(frozen=True)
class _Cell:
    """A cell on this rank: its session, and how it is timed. All methods are collective."""

    session: Session
    context: Context
    settings: MeasureSettings
    wall: WallClock
    device_clock: DeviceClock | None
    """None on a CPU."""

    def first_passes(self, interpreted: bool, say: Callable[[str], None]) -> _Passes:
        """Run the first pass and the one that is checked, and capture the CUDA graph if one is asked for."""
        session, context, settings = self.session, self.context, self.settings
        say("first pass")
        last_ms, peak_gib = self._one_pass(session.step)
        if interpreted and last_ms.max() / 1e3 > settings.time_budget_s:
            return _Passes(session.step, last_ms, peak_gib, warmed_up=False)
        session.release()
        rank_memory.fill_freed_with_nan(context.device, peak_gib)
        say("second pass")
        last_ms, peak_gib = self._one_pass(session.step)
        if not settings.graph:
            return _Passes(session.step, last_ms, peak_gib, warmed_up=True)
        say("capturing a graph")
        step = _captured(session)  # replays fill the output that the capture left in the session
        if is_audited(session):
            session.keeps_output = True
        last_ms, _ = self._one_pass(step)
        return _Passes(step, last_ms, peak_gib, warmed_up=True)

    def _one_pass(self, step: Callable[[], None]) -> tuple[np.ndarray[Any, Any], float]:
        """Return the wall time on every rank in ms, and this rank's peak memory in GiB."""
        with rank_memory.extra_peak(self.context.device) as peak:
            samples = self.wall.samples(step, self.session.restore, 1)
        return np.array(gather_number(samples[0], self.context)), peak.gib

    @property
    def _clocks(self) -> Sequence[Clock]:
        """The wall clock comes first, then, on a GPU, the device clock."""
        return [self.wall] if self.device_clock is None else [self.wall, self.device_clock]

    def time_in_rounds(self, step: Callable[[], None], watch: ClockWatch) -> Generator[RoundRequest, bool, _Timed]:
        """Time rounds of both clocks, between which other cells run theirs."""
        rounds = [ClockRounds(clock, step, self.session, self.context, self.settings) for clock in self._clocks]
        yield from run_rounds(rounds, self.session, self.context, watch)
        medians = dict(zip(("round_ms", "device_round_ms"), (each.medians_ms for each in rounds), strict=False))
        return _Timed([each.samples for each in rounds], medians, None)

    def time_each_clock(self, passes: _Passes, watch: ClockWatch) -> _Timed:
        """Time with one clock after the other, and check the result of the last iteration of each.

        If one pass takes longer than the time budget, the wall clock does not run: its sample is that of the last pass.
        """
        samples: list[Samples] = []
        complaint: str | None = None
        for clock, name in zip(self._clocks, ("wall", "device"), strict=False):
            if name == "wall" and passes.exceed(self.settings):
                samples.append([passes.last_ms])
                continue
            with watch:
                samples.append(self._until_precise(clock, passes.step))
            if is_audited(self.session):
                reason = timed_result_reason(self.session, name)
                complaint = complaint or reason
        return _Timed(samples, {}, complaint)

    def _until_precise(self, clock: Clock, step: Callable[[], None]) -> list[np.ndarray[Any, Any]]:
        """Time blocks of iterations until the median is precise enough or the time budget is spent.

        Rank 0 decides the size of each block and broadcasts it before the block, so that all ranks run equally many
        collectives. Returns per iteration the time on every rank in ms.
        """
        clock.warm_up(step, self.session.restore, WARMUP_ITERATIONS)
        samples: list[np.ndarray[Any, Any]] = []
        began = time.monotonic()
        while block := _from_rank_0(_next_block(samples, time.monotonic() - began, self.settings)):
            samples += timed_iterations(clock, step, self.session, block, self.context)
        return samples

    def audit(self, passes: _Passes, say: Callable[[str], None]) -> str | None:
        """Return why an iteration on changed inputs is wrong, or None. Only audited sessions are checked.

        On a CPU, a pass that takes longer than the time budget is not repeated.
        """
        session = self.session
        if not is_audited(session):
            return None
        wrong = None
        session.fresh = False
        if not passes.exceed(self.settings) or self.context.device.type == "cuda":
            say("checking an iteration on changed inputs")
            wrong = changed_inputs_reason(session, passes.step, self.context)
        session.keeps_output = False
        return wrong


def _next_block(samples: Sequence[np.ndarray[Any, Any]], spent_s: float, settings: MeasureSettings) -> int:
    """The iterations of the next block, 0 to stop."""
    count = len(samples)
    if count == 0:
        return min(FIRST_BLOCK, settings.max_iterations)
    left = settings.max_iterations - count
    if left <= 0 or spent_s >= settings.time_budget_s:
        return 0
    if count >= settings.min_iterations and precise_enough([each.max() for each in samples], settings.precision):
        return 0
    affordable = int((settings.time_budget_s - spent_s) / (spent_s / count))
    return max(1, min(left, affordable, max(count, settings.min_iterations - count)))


def _from_rank_0(block: int) -> int:
    agreed = torch.tensor(block)
    dist.broadcast(agreed, src=0)
    return int(agreed)


def _captured(session: Session) -> Callable[[], None]:
    """Return the step as the replay of a CUDA graph. The session's output is filled by the first replay."""

    def one_pass() -> None:
        session.restore()
        session.step()

    session.release()
    cuda_graph.warm_up(one_pass)
    session.release()
    return cuda_graph.capture(session.step).replay


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
