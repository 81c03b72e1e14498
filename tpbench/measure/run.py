"""Measure one cell on one rank: first pass, check, the clocks until the medians are precise, and a row's columns."""

import contextlib
import gc
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tpbench.measure import cuda_graph, rank_memory
from tpbench.measure.audit import changed_inputs_reason, poison
from tpbench.measure.chained import chained_run
from tpbench.measure.clocks import TIMED
from tpbench.measure.compile_time import compile_columns, listen, spent_s
from tpbench.measure.gpu import ClockWatch
from tpbench.measure.gpu_trace import TRACES, bottleneck_columns, keep_trace
from tpbench.measure.late import late_columns
from tpbench.measure.ranks import from_rank_0, gather_number, gather_numbers
from tpbench.measure.session import Context, Costs, IterationSchedule, MeasureSettings, Verdict
from tpbench.measure.statistics import Samples, summary
from tpbench.measure.stop_rules import MIN_ROUNDS, ClockRun, RoundRequest
from tpbench.measure.timers import DeviceTimer, Timer, WallTimer, cold_cache, mark, ms_between


class Cell:
    """A cell while it is measured on this rank: `begin`, then rounds if it is interleaved, then `finish`.

    The first pass compiles and fills caches. The second pass is checked, and its peak memory is stored. Then all clocks
    time further iterations, by themselves or in rounds between those of other cells. A session with a schedule runs
    exactly its iterations instead. All methods are collective.
    """

    def __init__(
        self,
        set_up: Callable[[], Any],
        context: Context,
        settings: MeasureSettings,
        copy_gb_per_s: float,
        interpreted: bool = False,
        interleaved: bool = False,
    ) -> None:
        """`set_up` returns an `AuditedSession` or a session with a schedule, and again one for each copy.

        `interpreted`: Triton's interpreter runs the kernels. A first pass that exceeds the time budget is then the only
        one. `interleaved`: other cells run in the same processes.
        """
        self.compiled_before_s = spent_s()
        self.set_up, self.session = set_up, set_up()
        listen()
        self.context, self.interpreted = context, interpreted
        self.settings = replace(settings, fresh=settings.fresh or not self.session.trusted)
        self.on_gpu = context.device.type == "cuda"
        cache = cold_cache(context.device, context.world_size)
        self.wall = WallTimer(context.device, cache)
        self.timers: dict[str, Timer] = {"wall": self.wall}
        if self.on_gpu:
            self.timers["device"] = DeviceTimer(context.device, cache)
        self.watch = ClockWatch(context.device)
        self.step = self.session.step  # what the clocks time: also the replay of its graph
        self.columns: dict[str, Any] = {"copy_gb_per_s": copy_gb_per_s}
        """Columns of the row so far."""
        self.runs: dict[str, ClockRun] = {}  # by the name of the clock
        self.in_rounds = interleaved
        """True if the clocks run in rounds: `run_round` until no cell needs more."""

    def begin(self) -> None:
        """Run the first passes and check the last of them. Afterwards `in_rounds` is known."""
        session, settings = self.session, self.settings
        if session.schedule is not None:
            self.in_rounds = False
            return
        peak_gib, warmed_up = self._first_passes()
        # One pass that takes longer than the budget is the measurement by wall clock.
        self.is_long = self.last_ms.max() / 1e3 > settings.time_budget_s
        self.verdict = self._check(peak_gib, warmed_up=warmed_up, graph=settings.graph, fresh=settings.fresh)
        self.in_rounds = self.in_rounds and not self.is_long and not self.verdict.wrong
        if not self.verdict.wrong:
            self.context.say("timing")
            session.fresh = settings.fresh
            self.runs = {
                name: ClockRun(timer, self.step, session, self.context, settings) for name, timer in self.timers.items()
            }

    def finish(self) -> Verdict:
        """Measure what is left, and return the verdict with all columns. A wrong result has no time."""
        if self.session.schedule is not None:
            self._run_schedule(self.session.schedule)
        elif not self.verdict.wrong:
            wrong = "" if self.in_rounds else self._run_alone()
            self._add_times(wrong)
        return replace(self.verdict, columns={**self.columns, **self.verdict.columns})

    def request(self) -> RoundRequest:
        """Return how much the cell needs the next round, by rank 0. While it waits it holds only inputs and graph."""
        for run in self.runs.values():
            run.session.restore()
            run.session.release()
        lengths = [run.next_round() for run in self.runs.values()]
        requests = [run.request(length, MIN_ROUNDS) for run, length in zip(self.runs.values(), lengths, strict=True)]
        request, *self.lengths = from_rank_0([min(requests), *lengths])
        return RoundRequest(request)

    def run_round(self) -> None:
        """Run a round of each clock, as long as the last request decided."""
        if not any(run.rounds for run in self.runs.values()):  # all other cells are set up
            self._add_chained()
            self.lengths += [1] * (len(self.runs) - len(self.lengths))
        with self.watch:
            for run, length in zip(self.runs.values(), self.lengths, strict=True):
                run.run_round(length)

    def _run_alone(self) -> str:
        """Run each clock until its median is precise. Return why a result is wrong, or an empty text."""
        if self.is_long:
            self.runs["wall"].rounds = [[self.last_ms]]
        for prepare in (lambda: None, self._add_chained):  # after the other clocks, which have all memory
            prepare()
            for name, run in self.runs.items():
                if not run.rounds:
                    with self.watch:
                        run.until_precise()
                    if wrong := run.session.check().wrong:
                        return f"the last iteration of the {name} clock, after a correct first one: {wrong}"
        return ""

    def _add_chained(self) -> None:
        """Prepare the chained clock, unless it cannot run."""
        if self.interpreted or self.is_long:
            too_long = "an iteration takes longer than the time budget"
            self.columns["not_chained"] = "Triton's interpreter runs the kernels" if self.interpreted else too_long
            return
        self.context.say("preparing iterations back to back")
        step_ms, peak_gib = float(self.last_ms.max()), self.columns["peak_gib"]
        run, columns = chained_run(
            self.session, self.step, self.set_up, self.context, self.settings, step_ms, peak_gib, self.in_rounds
        )
        self.columns |= columns
        if run is not None:
            self.runs["chained"] = run

    def _add_times(self, wrong: str) -> None:
        """Add the columns of iterations that a stop rule ended, after one more on changed inputs."""
        session, context = self.session, self.context
        rounds = {clock.rounds: self.runs[clock.name].medians_ms for clock in TIMED if clock.name in self.runs}
        samples = {name: run.samples for name, run in self.runs.items()}
        self.runs.clear()
        gc.collect()  # the copies of the inputs: their sessions are parts of reference cycles
        session.fresh = False
        # On a CPU a long pass is not repeated.
        if not wrong and (not self.is_long or self.on_gpu):
            context.say("checking an iteration on changed inputs")
            wrong = changed_inputs_reason(session, self.step, context) or ""
        session.keeps_output = False
        if wrong:
            self.verdict = replace(self.verdict, wrong=wrong)
            return
        self.columns |= self._gpu_columns(len(samples["wall"])) | time_columns(samples, self.columns)
        self.columns |= rounds if self.in_rounds else {}
        if self.settings.late and context.world_size > 1:
            context.say("letting a rank be late")
            self.columns |= late_columns(self.step, session, self.timers.get("device", self.wall), context)
        self._add_details()

    def _first_passes(self) -> tuple[float, bool]:
        """Run the first passes. Return the last one's peak memory on this rank in GiB, and whether another one ran."""
        peak_gib = self._one_pass("first pass")
        if self.interpreted and self.last_ms.max() / 1e3 > self.settings.time_budget_s:
            return peak_gib, False
        poison(self.session)  # the next pass will probably get the memory of these outputs
        self.session.release()
        peak_gib = self._one_pass("second pass")
        if self.settings.graph:
            self.context.say("capturing a graph")
            self.step = cuda_graph.captured_step(self.session)
            self._one_pass("first replay")
        return peak_gib, True

    def _one_pass(self, name: str) -> float:
        """Run a pass. Return its peak memory, and keep its wall time on every rank."""
        self.context.say(name)
        with rank_memory.extra_peak(self.context.device) as peak:
            samples = self.wall.samples(self.step, self.session.restore, 1)
        self.last_ms = gather_numbers(samples, self.context)[0]
        return peak.peak_gib[0]

    def _check(self, peak_gib: float, **columns: bool) -> Verdict:
        """Compare the last iteration with the oracle. Add its memory, costs, compile times, and these columns."""
        self.context.say("checking")
        verdict: Verdict = self.session.check()
        peaks = gather_number(peak_gib, self.context)
        self.columns |= {"rank_peak_gib": peaks, "peak_gib": max(peaks), **columns}
        self.columns |= cost_columns(self.session.costs, self.columns["copy_gb_per_s"])
        self.columns |= compile_columns(self.compiled_before_s, self.context)
        return verdict

    def _run_schedule(self, schedule: IterationSchedule) -> None:
        """Run each iteration of a schedule once, timed by wall clock and, on a GPU, by events, and check them all."""
        session, context = self.session, self.context
        self.columns["not_chained"] = "each iteration continues the one before"
        context.say("warming up")
        self.wall.warm_up(session.step, session.restore, schedule.warmup_iterations)
        graph_gib = session.capture() if context.graph else 0.0
        context.say("timing")
        usage = rank_memory.IterationMemory(context.device, schedule.held_before, graph_gib)
        marks: list[tuple[Any, Any]] = []

        def restore() -> None:
            usage.begin()
            session.restore()

        def step() -> None:
            begin = mark(context.device)
            session.step()
            marks.append((begin, mark(context.device)))

        with self.watch:
            times = self.wall.samples(step if self.on_gpu else session.step, restore, schedule.iterations)
        usage.end()
        samples = {"wall": gather_numbers(times, context)}
        if self.on_gpu:
            samples["device"] = gather_numbers([ms_between(*pair) for pair in marks], context)
        self.verdict = self._check(max(usage.peak_gib), warmed_up=True, graph=context.graph)
        for name, gib in (("iteration_held_gib", usage.held_gib), ("iteration_peak_gib", usage.peak_gib)):
            self.columns[name] = [float(ranks.max()) for ranks in gather_numbers(gib, context)]
        if not self.verdict.wrong:
            self.columns |= self._gpu_columns(schedule.iterations) | time_columns(samples, self.columns)
            self._add_details()

    def _gpu_columns(self, iterations: int) -> dict[str, Any]:
        """Return the clocks of a GPU, and the host time until the call of a step returned, of the last iterations."""
        if not self.on_gpu:
            return {}
        launches = gather_numbers(self.wall.launches_ms[-iterations:], self.context)
        return self.watch.columns(self.context) | {"launch_ms": float(np.median([ranks.max() for ranks in launches]))}

    def _add_details(self) -> None:
        """Add what further iterations show: the session's details, on a GPU the bottleneck, with `profile` a trace."""
        session, context = self.session, self.context
        context.say("timing details")
        self.columns |= session.details(self.columns)
        if self.on_gpu:
            context.say("tracing")
            self.columns |= bottleneck_columns(self.step, session, self.wall, context, self.columns)
        if self.settings.profile:
            context.say("keeping a trace")

            def iteration() -> None:
                session.restore()
                self.wall.line_up()
                self.step()

            with contextlib.suppress(OSError):  # a full disk must not cost the measurement, too
                keep_trace(iteration, context)
                self.columns["trace"] = TRACES


def cost_columns(costs: Costs, copy_gb_per_s: float) -> dict[str, Any]:
    """Return the unavoidable costs of an iteration and their time on this machine, the floor.

    floor_ms = max(bytes_moved / copy_gb_per_s + wire_ms, compute_ms), with two exceptions that `Costs` names. Without
    counted bytes it is missing.
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


def time_columns(samples: Mapping[str, Samples], costs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the statistics of each clock over iterations, on the slowest rank. `costs`: `cost_columns`."""
    columns: dict[str, Any] = {}
    for clock in TIMED:
        if clock.name in samples:
            slowest = [float(ranks.max()) for ranks in samples[clock.name]]
            columns |= {**summary(slowest, clock), clock.samples: slowest}
    columns["iterations"] = len(samples["wall"])
    columns["skew_ms"] = float(np.median([ranks.max() - ranks.min() for ranks in samples["wall"]]))
    if "floor_ms" in costs:
        best_ms = columns.get("device_ms", columns["time_ms"])
        columns["fraction_of_floor"] = costs["floor_ms"] / best_ms
        columns["gb_per_s"] = costs["bytes_moved"] / best_ms / 1e6
    return columns
