"""Three guards against stale results: a variant may do less when it is timed than when it is checked.

- Outputs lie in poisoned memory: before the last iteration of a clock, the outputs of the one before become NaN. A step
  that writes nothing returns NaN.
- The result of the last timed iteration of each clock is checked.
- Inputs change between iterations: before each timed one with `fresh`, which holds for all variants from outside this
  package, and before one more iteration after the timed ones. A stored answer is then wrong.

The oracle compares, so code that replaces functions of this process remains undetected.
"""

from __future__ import annotations

import dataclasses
import itertools
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpbench.measure.ranks import from_rank_0
from tpbench.measure.session import AuditedSession, Context, RepeatedSession

SLEEP_CYCLES = 40_000_000
"""About 20 ms: the device sleeps while the host queues the change of the inputs and the iteration."""


class Inputs:
    """The tensors that a variant reads in each iteration.

    A change negates a random half of the rows of each floating-point tensor, in place. So the right result changes, and
    the sizes of the numbers do not. Tensors that are equal on several ranks stay equal.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """`tensors`: all inputs of this rank. Collective."""
        self.tensors = list(tensors)
        self.seed, self.changes = common_seed(), 0

    def draw(self) -> dict[int, Tensor]:
        """Return random signs for the rows (rows,) of each floating-point tensor, by the tensor's index."""
        self.changes += 1
        drawn = {}
        for index, tensor in enumerate(self.tensors):
            if tensor.is_floating_point() and tensor.dim():
                generator = torch.Generator().manual_seed((self.seed + self.changes) * 1009 + index)
                signs = 2 * torch.randint(0, 2, (len(tensor),), generator=generator) - 1
                drawn[index] = signs.to(tensor.device)
        return drawn

    def change(self, drawn: Mapping[int, Tensor] | None = None) -> None:
        """Negate the rows of which the drawn sign is negative, on the current stream. None: draw new signs.

        The tensors' version counters stay as they are, so that no variant can watch them.
        """
        for index, signs in (self.draw() if drawn is None else drawn).items():
            tensor = self.tensors[index]
            tensor.data.mul_(signs.to(tensor.dtype).view(-1, *[1] * (tensor.dim() - 1)))


class GeneratedInputs(Inputs):
    """Inputs that are computed from a seed. A change takes those of another seed."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        seed: int,
        generate: Callable[[int], Sequence[Tensor]],
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`seed`: that of the tensors. `generate`: returns new tensors of a seed, which the session's oracle then uses,
        too. `changed`: called after each change."""
        super().__init__(tensors)
        self.first, self.generate, self.changed = seed, generate, changed

    def draw(self) -> dict[int, Tensor]:
        """Return the tensors of the next seed."""
        self.changes += 1
        return dict(enumerate(self.generate(self.first ^ self.changes)))

    def change(self, drawn: Mapping[int, Tensor] | None = None) -> None:
        """Copy the drawn tensors on the current stream. None: draw new ones."""
        for index, values in (self.draw() if drawn is None else drawn).items():
            self.tensors[index].data.copy_(values)
        self.changed()


def tensors_of(shard: Any) -> list[Tensor]:
    """Return the tensors in a dictionary or in the fields of a dataclass that aren't constant.

    Tuples and dictionaries may hold them, too.
    """
    if isinstance(shard, dict):
        return list(_tensors([shard]))
    fields = (field for field in dataclasses.fields(shard) if not field.metadata.get("constant"))
    return list(_tensors(getattr(shard, field.name) for field in fields))


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, dict)):
            yield from _tensors(value.values() if isinstance(value, dict) else value)


def common_seed() -> int:
    """Return a random number that is equal on all ranks and that a variant cannot know. Collective."""
    return from_rank_0([secrets.randbits(40)])[0]


def poison(session: RepeatedSession) -> None:
    """Fill the outputs of the last step with NaN. Their memory is what the next step will probably get."""
    for output in session.outputs():
        if output.is_floating_point() and 0 not in output.stride():
            output.data.fill_(float("nan"))


def restore_before(session: RepeatedSession, iterations: int) -> Callable[[], None]:
    """Return the session's `restore`. Before the last of the given number of iterations it also poisons the outputs."""
    calls = itertools.count(1)

    def restore() -> None:
        if next(calls) >= iterations:
            poison(session)
        session.restore()

    return restore


def timed_result_reason(session: RepeatedSession, clock: str) -> str | None:
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
