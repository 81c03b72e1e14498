"""Checks after the timed iterations, against variants that do less when they are timed.

- The result of the last timed iteration of each clock is checked. Its outputs lie in memory that was filled with NaN.
- One more iteration runs on changed inputs. A stored answer, and work that began before the iteration, are then wrong.
- Its outputs are read on the current stream at once. They must not change later: work on another stream or thread that
  was not joined would still write them.
- On a GPU some iterations on changed inputs are timed. Their result is checked, and they must not be much slower than
  the others. On a CPU times depend on what else runs: there each timed iteration of a user's variant has new inputs.
- On a GPU both clocks are compared: the device must not work for long after the end event.
- The inputs must be as they were before any code of the variant ran.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.measure.clock import Clock
from tpbench.measure.columns import Samples
from tpbench.measure.inputs import Inputs
from tpbench.measure.ranks import gather_number, gather_numbers
from tpbench.measure.session import Context, Session, Verdict

SLEEP_CYCLES = 40_000_000
"""About 20 ms: the device sleeps while the host queues the change of the inputs and the iteration."""

SAMPLED_ELEMENTS = 2**14
"""Elements of each output that are read at once after an iteration."""

CHANGED_ITERATIONS = 5
"""Iterations that are timed on changed inputs."""

MAX_SLOWDOWN = 2.0
"""A variant is refused if each iteration on changed inputs takes more than this many times as long as nearly all timed
ones. In 115 honest cells on one H200 the fastest iteration on changed inputs was never slower than the 95th percentile
of the timed ones."""


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


def poison(session: AuditedSession) -> None:
    """Fill the outputs of the last step with NaN. Their memory is what the next step will probably get."""
    for each in session.outputs():
        if each.is_floating_point() and 0 not in each.stride():
            each.data.fill_(float("nan"))


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
    cuda = context.device.type == "cuda"
    poison(session)
    if cuda:
        torch.cuda.synchronize(context.device)
    drawn = session.audited_inputs.draw()
    dist.barrier()
    if cuda:
        torch.cuda._sleep(SLEEP_CYCLES)
    # On the current stream, behind the sleep: a kernel that does not wait for this stream reads the old inputs.
    session.audited_inputs.change(drawn)
    session.restore()
    step()
    samples = [_sample(each) for each in session.outputs()]
    if cuda:
        torch.cuda.synchronize(context.device)
    outputs = list(session.outputs())
    wrong = session.check().wrong
    late = any(
        not torch.equal(_bits(early), _bits(each.detach()[index]))
        for each, (index, early) in zip(outputs, samples, strict=True)
    )
    if on_any_rank(late, context):
        return "a result changed after its iteration had ended: work was left on another stream or thread"
    return f"with changed inputs, after a correct result with the first ones: {wrong}" if wrong else None


def changed_iterations_reason(
    session: AuditedSession,
    step: Callable[[], None],
    clock: Clock,
    timed: Samples,
    context: Context,
) -> str | None:
    """Return that iterations on changed inputs are wrong, or take longer than the timed ones, or None. Collective.

    A variant that recognises its inputs and returns a stored answer is slower on new ones. For a complaint, each of
    several iterations takes more than `MAX_SLOWDOWN` times as long as nearly all timed ones: far above noise.
    """
    session.fresh = True
    changed = gather_numbers(clock.samples(step, session.restore, CHANGED_ITERATIONS), context)
    session.fresh = False
    wrong = None if session.trusted else session.check().wrong
    if wrong:
        return f"timed with changed inputs, after a correct result with the first ones: {wrong}"
    return slower_reason(changed, timed)


def slower_reason(changed: Samples, timed: Samples) -> str | None:
    """Return that each iteration on changed inputs takes much longer than nearly all timed ones, or None."""
    longer, usual = [each.max() for each in changed], [each.max() for each in timed]
    if min(longer) <= MAX_SLOWDOWN * np.percentile(usual, 95):
        return None
    return (
        f"an iteration takes {np.median(longer):.3g} ms if its inputs have changed, and {np.median(usual):.3g} ms if "
        "not: it returns stored answers"
    )


def written_inputs_reason(session: AuditedSession, context: Context) -> str | None:
    """Return that a variant wrote to its inputs, or None. Collective."""
    session.fresh = session.keeps_output = False
    session.audited_inputs.undo()
    session.restore()
    written = on_any_rank(not session.audited_inputs.unchanged(), context)
    return "the variant wrote to its inputs" if written else None


def audit(
    session: AuditedSession,
    step: Callable[[], None],
    context: Context,
    another_iteration: bool,
    device_clock: tuple[Clock, Samples] | None,
) -> str | None:
    """Return the first reason why the measurement does not count, or None. Collective.

    `another_iteration`: false if a further iteration would take too long. Then only the inputs are compared.
    `device_clock`: that clock with its samples, if there is one.
    """
    wrong = changed_inputs_reason(session, step, context) if another_iteration else None
    if not wrong and device_clock is not None:
        wrong = changed_iterations_reason(session, step, *device_clock, context)
    return wrong or written_inputs_reason(session, context)


def refused(verdict: Verdict, reason: str | None) -> Verdict:
    """Return the verdict, with that reason if there is one."""
    return Verdict(verdict.columns, reason) if reason else verdict


def on_any_rank(flag: bool, context: Context) -> bool:
    """Return True if the flag is set on any rank. Collective."""
    return max(gather_number(float(flag), context)) > 0


def _sample(output: Tensor) -> tuple[Any, Tensor]:
    """Return random places of an output and the values there, read on the current stream."""
    index = tuple(torch.randint(0, size, (SAMPLED_ELEMENTS,), device=output.device) for size in output.shape)
    return index, output.detach()[index].clone()


def _bits(values: Tensor) -> Tensor:
    """Return the bits of floating-point values, so that NaNs compare as equal."""
    return values.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])
