"""The inputs of a session, which change between iterations: a stored answer is then wrong."""

from __future__ import annotations

import dataclasses
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


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


class GeneratedInputs(Inputs, ABC):
    """Inputs that are computed from a seed. A change takes those of another seed."""

    def __init__(self, tensors: Sequence[Tensor], seed: int) -> None:
        """`seed`: that of the tensors."""
        super().__init__(tensors)
        self.first = seed

    @abstractmethod
    def generate(self, seed: int) -> list[Tensor]:
        """Return new tensors of a seed. From now on the session's oracle uses that seed, too."""

    def draw(self) -> dict[int, Tensor]:
        """Return the tensors of the next seed."""
        self.changes += 1
        return dict(enumerate(self.generate(self.first ^ self.changes)))

    def change(self, drawn: Mapping[int, Tensor] | None = None) -> None:
        """Copy the drawn tensors on the current stream. None: draw new ones."""
        for index, values in (self.draw() if drawn is None else drawn).items():
            self.tensors[index].data.copy_(values)


def tensors_of(shard: Any) -> list[Tensor]:
    """Return the tensors in the fields of a dataclass, also those in tuples."""
    return list(_tensors(getattr(shard, each.name) for each in dataclasses.fields(shard)))


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)


def common_seed() -> int:
    """Return a random number that is equal on all ranks and that a variant cannot know. Collective."""
    seed = torch.tensor(secrets.randbits(40))
    if dist.is_initialized():
        dist.broadcast(seed, src=0)
    return int(seed)
