"""Guards against stale and unfinished results. A variant may do less when it is timed than when it is checked.

- Outputs lie in poisoned memory. Before the last iteration of a clock, the outputs of the one before become NaN. A step
  that writes nothing returns NaN.
- The result of the last timed iteration of each clock is checked.
- Inputs change before one more iteration after the timed ones. With `fresh` they change before each timed one, too;
  variants from outside this package always have it. A stored answer is then wrong.
- In that iteration ranks begin one after the other, on a GPU behind a sleep of the device. A sample of the outputs is
  compared with its values when the step returned. A step that doesn't wait for its transfers is then wrong.

The oracle compares, so code that replaces functions of this process remains undetected.
"""

import dataclasses
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from tpbench.measure.ranks import from_rank_0, on_any_rank
from tpbench.measure.session import Context, Session

SLEEP_CYCLES, SLEEP_S = 40_000_000, 0.02
"""About 20 ms. Each rank begins so much later than the rank before it. A device also sleeps so long before the change
of the inputs, while its host queues the iteration."""

MOST_SAMPLES = 2**20
"""About so many elements of each output are compared with their values when the step returned."""
MOST_SIGNS = 2**16
"""Signs of a tensor. The host draws them before each iteration, so neighbours among more rows share one."""


class Inputs:
    """The tensors that a variant reads in each iteration.

    A change negates a random half of the rows (along the last dimension) of each floating-point or complex tensor, in
    place, or of the elements of its only row. Tensors that are equal on several ranks stay equal.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        generate: Callable[[int], Sequence[Tensor]] | None = None,
        seed: int = 0,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`tensors`: all inputs of this rank. `generate`: returns the first of them anew, from a seed, in place of a
        change of signs. `seed`: that of the tensors. `changed`: called after each change. Collective."""
        self.tensors, self.generate, self.seed, self.changed = list(tensors), generate, seed, changed
        self.secret, self.changes = common_seed(), 0

    def draw(self) -> dict[int, Tensor]:
        """Return by a tensor's index its new values or, without `generate`, random signs to multiply it by."""
        self.changes += 1
        if self.generate is not None:
            return dict(enumerate(self.generate(self.seed ^ self.changes)))
        drawn = {}
        for index, tensor in enumerate(self.tensors):
            if (tensor.is_floating_point() or tensor.is_complex()) and tensor.dim():
                generator = torch.Generator().manual_seed((self.secret + self.changes) * 1009 + index)
                has_rows = tensor.shape[:-1].numel() != 1
                shape = (*tensor.shape[:-1], 1) if has_rows else tensor.shape
                count = math.prod(shape)
                few = torch.randint(0, 2, (min(count, MOST_SIGNS),), dtype=torch.int8, generator=generator)
                signs = (2 * few - 1).to(tensor.device).repeat_interleave(-(-count // MOST_SIGNS))
                drawn[index] = signs[:count].view(shape)
        return drawn

    def change(self, drawn: Mapping[int, Tensor] | None = None) -> None:
        """Take the drawn values, or negate the rows whose sign is negative, unseen by version counters. None: draw."""
        for index, values in (self.draw() if drawn is None else drawn).items():
            data = self.tensors[index].data
            if self.generate is not None:
                data.copy_(values)
            else:
                data.mul_(values.to(data.dtype))
        self.changed()


class AuditedSession(Session):
    """A session whose iterations do not depend on each other, and whose inputs and outputs the guards watch."""

    audited_inputs: Inputs
    fresh = False  # true if `restore` changes the inputs before each iteration
    keeps_output = False  # true if the output lives on after the check: each replay of a CUDA graph fills it again
    overwrites_inputs = False  # true if a step overwrites inputs, which `restore` then restores


def named_tensors(value: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors in lists, tuples, dictionaries, or in the fields of a dataclass that aren't constant, with
    their names or places."""
    if dataclasses.is_dataclass(value):
        fields = (field for field in dataclasses.fields(value) if not field.metadata.get("constant"))
        value = {field.name: getattr(value, field.name) for field in fields}
    leaves = [(path, leaf) for path, leaf in tree_flatten_with_path(value)[0] if isinstance(leaf, Tensor)]
    return [(getattr(path[0], "key", keystr(path)) if len(path) == 1 else keystr(path), leaf) for path, leaf in leaves]


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of `named_tensors`."""
    return [tensor for _, tensor in named_tensors(value)]


def common_seed() -> int:
    """Return a random number that is equal on all ranks and that no variant can know. Collective."""
    return from_rank_0([secrets.randbits(40)])[0]


def poison(session: Session) -> None:
    """Fill the outputs of the last step with NaN. Their memory is what the next step will probably get."""
    for output in session.outputs():
        if (output.is_floating_point() or output.is_complex()) and 0 not in output.stride():
            output.data.fill_(float("nan"))


def sampled(output: Tensor) -> Tensor:
    """Return every n-th element along each dimension, so that about `MOST_SAMPLES` remain. Copies nothing."""
    every = math.ceil((output.numel() / MOST_SAMPLES) ** (1 / max(output.dim(), 1))) or 1
    return output[(slice(None, None, every),) * output.dim()]


def changed_inputs_reason(session: AuditedSession, step: Callable[[], None], context: Context) -> str | None:
    """Run an iteration on changed inputs. Return why its result is wrong, or None. Collective.

    Ranks begin in their order and, for a variant from outside, again in the other order: one that doesn't wait for a
    later rank returns too early.
    """
    orders = [context.rank] if session.trusted else [context.rank, context.world_size - 1 - context.rank]
    on_gpu = context.device.type == "cuda"
    for place in orders:  # the number of ranks that begin before this one
        poison(session)
        drawn = session.audited_inputs.draw()
        if on_gpu:
            torch.cuda.synchronize(context.device)
            dist.barrier()
            # The change waits behind the sleep: a kernel that does not wait for this stream reads the old inputs.
            torch.cuda._sleep(SLEEP_CYCLES)
        session.audited_inputs.change(drawn)
        del drawn  # as large as the inputs if these are generated: the timed iterations had that memory
        session.restore()
        # Right before the step: the change may be collective, which lines the ranks up.
        if on_gpu:
            torch.cuda._sleep(SLEEP_CYCLES * place)
        else:
            time.sleep(SLEEP_S * place)
        step()
        outputs = session.outputs()
        returned = [sampled(output).clone() for output in outputs]
        if wrong := session.check().wrong:
            return f"with changed inputs, after a correct result with the first ones: {wrong}"
        if on_any_rank(not all(map(torch.equal, returned, map(sampled, outputs))), context):
            return "the step returned before its output was complete: let it wait for its collectives"
    return None
