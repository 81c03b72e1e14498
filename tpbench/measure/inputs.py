"""The inputs of a session: change them between iterations, and prove that a variant did not."""

from __future__ import annotations

import dataclasses
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_CHUNK = {"cpu": 2**18, "cuda": 2**22}
"""Elements of a fingerprint at once, in three temporaries of 8 bytes each. Those of a CPU fit into its cache."""

_MIX = (-7046029254386353131, -4417276706812531889, -8796714831421723037)
"""Odd 64-bit multipliers of common integer hashes (splitmix64, xxHash)."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Inputs:
    """The tensors that a variant reads in each iteration, and must leave as they are.

    A change negates a random half of the rows of each floating-point tensor, in place. So the right result changes, the
    sizes of the numbers do not, and a second negation restores every bit. Tensors that are equal on several ranks stay
    equal.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """`tensors`: all inputs of this rank."""
        self.tensors = list(tensors)
        self.fingerprints: list[int] | None = None
        self.seed, self.changes = 0, 0
        self.signs: dict[int, Tensor] = {}
        """By the tensor's index: the sign of each row (rows,) against the first inputs."""

    def remember(self) -> None:
        """Store a fingerprint of every tensor. Call this before any code of a variant runs. Collective."""
        self.fingerprints = [fingerprint(each) for each in self.tensors]
        self.seed = common_seed()

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
            self._multiply(self.tensors[index], signs)
            self.signs[index] = signs * self.signs.get(index, 1)

    def undo(self) -> None:
        """Undo all changes."""
        for index, signs in self.signs.items():
            self._multiply(self.tensors[index], signs)
        self.signs.clear()

    def unchanged(self) -> bool:
        """Return True if every bit is as it was when `remember` was called. Call `undo` before."""
        return self.fingerprints == [fingerprint(each) for each in self.tensors]

    def _multiply(self, tensor: Tensor, signs: Tensor) -> None:
        tensor.data.mul_(signs.to(tensor.dtype).view(-1, *[1] * (tensor.dim() - 1)))


class GeneratedInputs(Inputs, ABC):
    """Inputs that are computed from a seed. A change takes those of another seed."""

    def __init__(self, tensors: Sequence[Tensor], seed: int) -> None:
        """`seed`: that of the tensors."""
        super().__init__(tensors)
        self.first = self.now = seed
        self.written = False

    @abstractmethod
    def generate(self, seed: int) -> list[Tensor]:
        """Return new tensors of a seed. From now on the session's oracle uses that seed, too."""

    def draw(self) -> dict[int, Tensor]:
        """Return the tensors of the next seed."""
        self.changes += 1
        self.now = self.first ^ self.changes
        return dict(enumerate(self.generate(self.now)))

    def change(self, drawn: Mapping[int, Tensor] | None = None) -> None:
        """Copy the drawn tensors on the current stream. None: draw new ones."""
        for index, values in (self.draw() if drawn is None else drawn).items():
            self.tensors[index].data.copy_(values)

    def undo(self) -> None:
        """Restore the first inputs, after a check that every bit is still as the last change left it."""
        expected = self.generate(self.now)
        self.written = [fingerprint(each) for each in self.tensors] != [fingerprint(each) for each in expected]
        self.now = self.first
        self.change(dict(enumerate(self.generate(self.first))))

    def unchanged(self) -> bool:
        return not self.written


def tensors_of(shard: Any) -> list[Tensor]:
    """Return the tensors in the fields of a dataclass, also those in tuples."""
    return list(_tensors(getattr(shard, each.name) for each in dataclasses.fields(shard)))


def fingerprint(tensor: Tensor) -> int:
    """Return a number that depends on every bit of the tensor and on its place."""
    flat = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    step = _CHUNK[tensor.device.type]
    for start in range(0, len(flat), step):
        words = flat[start : start + step].to(torch.int64, copy=True)
        words += torch.arange(start, start + len(words), device=tensor.device) * _MIX[0]
        words *= _MIX[1]
        words ^= words >> 31
        words *= _MIX[2]
        total += (words ^ (words >> 29)).sum()
    return int(total)


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
