"""Checks of a schedule of iterations, such as training steps, after the timed ones."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from tpbench.measure.audit import slower_reason
from tpbench.measure.clock import WallClock
from tpbench.measure.clock_comparison import late_idle_reason
from tpbench.measure.columns import Samples
from tpbench.measure.ranks import gather_numbers
from tpbench.measure.session import Context, ScheduledSession, Session


@runtime_checkable
class AuditedSchedule(Session, ScheduledSession, Protocol):
    """A session with a fixed number of iterations whose losses can be audited."""

    audited: bool
    """True if this session is audited."""
    changed_iterations: int
    """Iterations on changed inputs that follow the timed ones. 0: none can be checked."""
    fresh: bool
    """True if `restore` takes changed inputs."""

    def check_changed(self) -> str | None:
        """Return why an iteration on changed inputs is wrong, or None. Collective."""


def audit_schedule(
    session: AuditedSchedule, wall: WallClock, timed: Samples, on_device: Samples | None, context: Context
) -> str | None:
    """Return the first reason why the timed iterations of a schedule do not count, or None. Collective.

    `timed`: by wall clock. `on_device`: the same iterations between events, on a GPU.
    """
    if on_device is not None and (wrong := late_idle_reason(timed, on_device)):
        return wrong
    if not session.changed_iterations:
        return None
    session.fresh = True
    changed = gather_numbers(wall.samples(session.step, session.restore, session.changed_iterations), context)
    session.fresh = False
    wrong = session.check_changed()
    # Without a GPU other programs share the cores: then a few slow iterations prove nothing.
    return wrong or (slower_reason(changed, timed) if on_device is not None else None)
