"""Audit of a variant from outside this package: it must train in every step as it does in the first ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tpbench.measure.audit import subclass_reason
from tpbench.measure.inputs import common_seed
from tpbench.workloads import Variant
from tpbench.workloads.returned import require
from tpbench.workloads.train_step.correctness.reference import Reference
from tpbench.workloads.train_step.problem import TrainStep
from tpbench.workloads.train_step.training.batches import Batch, rolled

CHANGED_STEPS = 3
"""Further steps on changed batches: those of the last timed step, rolled."""


class RunAudit:
    """The observations of one run on one rank.

    A loss is copied as its step ends. The batches of each step are compared with copies. After the timed steps, the
    variant trains on changed batches, whose losses cannot be known before.
    """

    def __init__(self, problem: TrainStep, variant: Variant) -> None:
        """Draw the changed batches. Collective."""
        self.problem, self.variant = problem, variant
        generator = torch.Generator().manual_seed(common_seed())
        rolls = torch.randint(1, problem.seq_length, (CHANGED_STEPS,), generator=generator)
        self.changes: tuple[int, ...] = tuple(rolls.tolist())
        """By how many positions each further step rolls its batches. Equal on all ranks."""
        self.kept: list[Batch] = []
        self.wrote = False
        self.subclass: str | None = None
        """Why a loss or a norm is no plain tensor."""

    def read(self, value: Any) -> Tensor:
        """Return a copy of a loss or a norm, made on the current stream at once: nothing can write it later.

        Raises WrongReturn if the value is no tensor.
        """
        result: Tensor = require(value, Tensor, self.variant, "accumulate or update")
        self.subclass = self.subclass or subclass_reason(result)
        return result.detach().clone()

    def keep(self, batches: Sequence[Batch]) -> None:
        """Copy the batches of the next step."""
        self.kept = rolled(batches, 0)

    def compare(self, batches: Sequence[Batch]) -> None:
        """Note whether the last step wrote to its batches."""
        for batch, kept in zip(batches, self.kept, strict=False):
            same = torch.equal(batch.tokens, kept.tokens) and torch.equal(batch.labels, kept.labels)
            self.wrote = self.wrote or not same

    def complaint(self, reference: Reference, losses: Sequence[float]) -> str | None:
        """Return why the run is wrong on this rank, or None. `losses`: those of all steps so far."""
        if self.wrote:
            return "the variant wrote to its inputs"
        if self.subclass:
            return self.subclass
        if reference.later is None:
            return None
        first, end = self.problem.warmup_steps, self.problem.warmup_steps + self.problem.steps
        return reference.later.complaint(losses[first:end], losses[end:], self.problem.dtype)
