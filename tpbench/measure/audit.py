"""Three guards against stale results, for variants that do less when they are timed than when they are checked.

- Outputs lie in poisoned memory: before the last iteration of a clock, the outputs of the one before become NaN. A step
  that writes nothing returns NaN.
- The result of the last timed iteration of each clock is checked.
- Inputs change between iterations: before each timed one with `fresh`, which holds for all variants from outside this
  package, and before one more iteration after the timed ones. A stored answer is then wrong.

The oracle compares, so code that replaces functions of this process remains undetected.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeGuard, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.measure.inputs import Inputs
from tpbench.measure.ranks import gather_number
from tpbench.measure.session import Context, Session, Verdict
from tpbench.measure.settings import MeasureSettings

SLEEP_CYCLES = 40_000_000
"""About 20 ms: the device sleeps while the host queues the change of the inputs and the iteration."""


@runtime_checkable
class AuditedSession(Session, Protocol):
    """A session whose inputs and outputs can be audited."""

    audited_inputs: Inputs
    audited: bool
    """True if this session is audited."""
    trusted: bool
    """True for a variant of this package."""
    fresh: bool
    """True if `restore` changes the inputs before each iteration."""
    keeps_output: bool
    """True if the output lives on after the check, as that of a CUDA graph does: each replay fills it again."""

    def outputs(self) -> Sequence[Tensor]:
        """Return the tensors of the last step's result that a step must compute."""


def is_audited(session: Session) -> TypeGuard[AuditedSession]:
    """Return True if the session is audited."""
    return isinstance(session, AuditedSession) and session.audited


def prepare_audit(session: Session, settings: MeasureSettings) -> MeasureSettings:
    """Audit a session whose inputs change between iterations, and return the settings that then apply.

    The inputs of a variant from outside this package always change.
    """
    if isinstance(session, AuditedSession):
        settings = replace(settings, fresh=settings.fresh or not session.trusted)
        session.audited |= settings.fresh  # the oracle must see a result of the last inputs
    return settings


def poison(session: AuditedSession) -> None:
    """Fill the outputs of the last step with NaN. Their memory is what the next step will probably get."""
    for output in session.outputs():
        if output.is_floating_point() and 0 not in output.stride():
            output.data.fill_(float("nan"))


def restore_before(session: Session, iterations: int) -> Callable[[], None]:
    """Return the session's `restore`. If the session is audited, it also poisons the outputs before the last of the
    given number of iterations."""
    if not is_audited(session):
        return session.restore
    calls = itertools.count(1)

    def restore() -> None:
        if next(calls) >= iterations:
            poison(session)
        session.restore()

    return restore


def lazy_output_reason(session: Session) -> str | None:
    """Return why an output of a variant from outside this package is no plain tensor, or None."""
    outputs = session.outputs() if isinstance(session, AuditedSession) and not session.trusted else ()
    return next(filter(None, map(subclass_reason, outputs)), None)


def subclass_reason(value: Tensor) -> str | None:
    """Return that a result is no plain tensor, or None. A subclass may compute its values when it is read."""
    return None if type(value) is Tensor else f"the step returned a {type(value).__name__} in place of a torch.Tensor"


def timed_result_reason(session: Session, clock: str) -> str | None:
    """Return why the result of the last timed iteration is wrong, or None. Collective."""
    wrong = session.check().wrong
    return f"the last iteration of the {clock} clock, after a correct first one: {wrong}" if wrong else None


def changed_inputs_reason(session: AuditedSession, step: Callable[[], None], context: Context) -> str | None:
    """Run an iteration on changed inputs. Return why its result is wrong, or None. Collective."""
    poison(session)
    drawn = session.audited_inputs.draw()
    if context.device.type == "cuda":
        torch.cuda.synchronize(context.device)
        dist.barrier()
        # The change waits behind the sleep: a kernel that does not wait for this stream reads the old inputs.
        torch.cuda._sleep(SLEEP_CYCLES)
    session.audited_inputs.change(drawn)
    session.restore()
    step()
    wrong = session.check().wrong
    return f"with changed inputs, after a correct result with the first ones: {wrong}" if wrong else None


def refused(verdict: Verdict, reason: str | None) -> Verdict:
    """Return the verdict, with that reason if there is one."""
    return Verdict(verdict.columns, reason) if reason else verdict


def on_any_rank(flag: bool, context: Context) -> bool:
    """Return True if the flag is set on any rank. Collective."""
    return max(gather_number(float(flag), context)) > 0
