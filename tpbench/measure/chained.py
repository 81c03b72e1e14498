"""The chained clock: iterations back to back, as a training loop runs them.

No barrier, flush or restore lies between two iterations, and the host waits only if a step does. The iterations rotate
through copies of the inputs, each a set-up of the variant, and so find their inputs outside of the L2 cache.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tpbench.measure import cuda_graph, rank_memory
from tpbench.measure.audit import AuditedSession, common_seed
from tpbench.measure.ranks import on_any_rank
from tpbench.measure.session import Context, MeasureSettings, Session, Verdict
from tpbench.measure.stop_rules import ROUNDS, ClockRun
from tpbench.measure.timers import Timed, WallTimer, synchronize

LEAST_ITERATIONS, MIN_BLOCKS = 2, 8
"""Iterations of a block that takes longer than a round, and blocks before the median counts as precise, if the settings
ask for as many iterations."""

CPU_COPIES, COPIES_FOR_ONE_USE, MOST_COPIES = 2, 8, 32
"""Copies, with the inputs themselves: on a CPU; on a GPU of inputs that an iteration overwrites, or that change, since
a block uses each of them once; and most of others. If more are needed, a step launches longer than it reads."""


class Chain(WallTimer, Session):
    """Wall time of blocks of iterations, divided by their number, and the session whose step is such a block."""

    def __init__(
        self,
        device: torch.device,
        copies: Sequence[tuple[AuditedSession, Callable[[], None]]],
        iterations: int,
        changes: bool,
    ) -> None:
        """`copies`: sessions with what is timed of each. `iterations`: at most so many in a block, on every rank.
        `changes`: the number differs from block to block, so that no variant knows the last one. Collective."""
        super().__init__(device, torch.empty(0, device=device))
        self.copies, self.most, self.changes = copies, iterations, changes
        self.iterations = iterations  # of the present block
        self.place = 0  # of the copy that ran last
        self.random = random.Random(common_seed())

    def interleaved(self, timed: Sequence[Timed], iterations: int) -> list[list[float]]:
        """Return the milliseconds of an iteration in each block."""
        return [[super(Chain, self).interleaved(timed, 1)[0][0] / self.iterations for _ in range(iterations)]]

    def warm_up(self, step: Callable[[], None], restore: Callable[[], None], iterations: int) -> None:
        """Run single iterations, no whole blocks."""
        restore()
        self.run(iterations)
        synchronize(self.device)

    @property
    def last(self) -> AuditedSession:
        return self.copies[self.place][0]

    def step(self) -> None:
        """Run the iterations of a block."""
        self.run(self.iterations)

    def run(self, iterations: int) -> None:
        """Run some iterations, and free the output of each before the next one."""
        for _ in range(iterations):
            self.last.release()
            self.place = (self.place + 1) % len(self.copies)
            self.copies[self.place][1]()

    def release(self) -> None:
        self.last.release()

    def outputs(self) -> list[Tensor]:
        """Return the outputs that copies hold: of the last iteration and, with graphs, those of each copy."""
        return [output for session, _ in self.copies for output in session.outputs()]

    def restore(self) -> None:
        """Restore the inputs of every copy before a block."""
        for session, _ in self.copies:
            session.restore()
        if self.changes:
            self.iterations = self.random.randint((self.most + 1) // 2, self.most)

    def check(self) -> Verdict:
        return self.last.check()


def chained_run(
    session: AuditedSession,
    step: Callable[[], None],
    set_up: Callable[[], AuditedSession],
    context: Context,
    settings: MeasureSettings,
    step_ms: float,
    peak_gib: float,
    interleaved: bool = False,
) -> tuple[ClockRun | None, dict[str, Any]]:
    """Return the run of the chained clock, or None, and its columns: the number of copies, or why it doesn't run.

    The session is the first copy, of which `step` is timed. An iteration takes `step_ms`, and `peak_gib` beyond its
    inputs. Beside `interleaved` cells, the copies take at most a quarter of the free memory. Collective.
    """
    device, on_gpu = context.device, context.device.type == "cuda"
    one_use = settings.fresh or session.overwrites_inputs
    input_bytes = sum(tensor.nbytes for tensor in session.audited_inputs.tensors)
    wanted = copies_needed(input_bytes, device, one_use)
    copies = [(session, step)]
    graph_pool = torch.cuda.graph_pool_handle() if settings.graph and on_gpu else None
    not_twice = "the variant cannot be set up twice"
    # The memory for two copies must be free, because a set-up may need more than what it leaves.
    least_bytes = 2 * (2 * input_bytes + int(max(peak_gib, 0.0) * 2**30))
    if interleaved:
        least_bytes = max(least_bytes, rank_memory.available_bytes(device) * 3 // 4)
    began = time.monotonic()
    while on_any_rank(len(copies) < wanted, context):
        if on_gpu:
            torch.cuda.empty_cache()
        full = rank_memory.available_bytes(device) < least_bytes
        if on_any_rank(full or (len(copies) > 1 and time.monotonic() - began > settings.time_budget_s), context):
            break
        failure = ""
        try:
            copies.append(_another(set_up, context, settings, graph_pool, len(copies)))
        except Exception as error:  # a measured cell must not be lost
            failure = f"{not_twice}: {type(error).__name__}: {error}"
        if on_any_rank(bool(failure), context):
            return None, {"not_chained": failure or f"{not_twice} on another rank"}
    if one_use and len(copies) < 2:
        reason = "each iteration overwrites or changes its inputs, and there is no memory for copies of them"
        return None, {"not_chained": reason}
    most, round_ms = settings.max_iterations, settings.time_budget_s * 1e3 / ROUNDS
    iterations = max(LEAST_ITERATIONS, int(min(most // ROUNDS, round_ms / max(step_ms, 1e-6))))
    iterations = min(iterations, most, len(copies) if one_use else most)
    chain = Chain(device, copies, iterations, changes=settings.fresh)
    blocks = replace(
        settings,
        min_iterations=min(settings.min_iterations, MIN_BLOCKS),
        # Rounds end with the first clock that reaches its limit, which must not be this one.
        max_iterations=most if interleaved else max(1, most // iterations),
    )
    return ClockRun(chain, chain.step, chain, context, blocks), {"chained_copies": len(copies)}


def copies_needed(input_bytes: int, device: torch.device, one_use: bool) -> int:
    """Return the number of copies, with the inputs themselves: together at least twice the L2 cache of a GPU."""
    if device.type == "cpu":
        return CPU_COPIES
    if one_use:
        return COPIES_FOR_ONE_USE
    rotated = 2 * int(torch.cuda.get_device_properties(device).L2_cache_size)
    return min(MOST_COPIES, -(-rotated // max(1, input_bytes)))


def _another(
    set_up: Callable[[], AuditedSession], context: Context, settings: MeasureSettings, graph_pool: Any, number: int
) -> tuple[AuditedSession, Callable[[], None]]:
    """Return one more copy, which has run. Copies of graphs share the memory of their temporary tensors."""
    session = set_up()
    session.fresh = settings.fresh
    session.audited_inputs.changes = number << 10  # other changes than those of the other copies
    for _ in range(2):  # like the first passes: some steps capture a part of themselves when they run again
        session.restore()
        session.step()
    synchronize(context.device)
    session.release()
    return session, cuda_graph.captured_step(session, graph_pool) if settings.graph else session.step
