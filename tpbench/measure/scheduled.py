"""The measurement of a session that says how many iterations there are, such as steps of training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tpbench.measure import memory
from tpbench.measure.clock import WallClock
from tpbench.measure.columns import cost_columns, memory_columns, time_columns
from tpbench.measure.ranks import by_rank
from tpbench.measure.session import Context, Schedule, Session, Verdict


def run_scheduled(
    session: Session,
    schedule: Schedule,
    context: Context,
    wall: WallClock,
    copy_gb_per_s: float,
    say: Callable[[str], None],
) -> tuple[Verdict, dict[str, Any]]:
    """Each iteration is timed once, by wall and, on a GPU, by events around the same iteration (its launches are not
    queued ahead). The memory watched is that of the timed ones. Collective."""
    pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def between_events() -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        session.step()
        end.record()
        pairs.append((begin, end))

    cuda = context.device.type == "cuda"
    say("warming up")
    wall.samples(session.step, session.restore, schedule.warmup_iterations)
    say("timing")
    with memory.extra_peak(context.device, schedule.held_before) as peak:
        mine = wall.samples(between_events if cuda else session.step, session.restore, schedule.iterations)
    on_device = by_rank([begin.elapsed_time(end) for begin, end in pairs], context) if cuda else None
    say("checking")
    verdict = session.check()
    columns: dict[str, Any] = {
        **memory_columns(peak.gib, context),
        "warmed_up": True,
        "graph": False,
        **cost_columns(session.costs, copy_gb_per_s),
    }
    if verdict.wrong:
        return verdict, columns
    return verdict, time_columns(session, context, by_rank(mine, context), on_device, columns, say)
