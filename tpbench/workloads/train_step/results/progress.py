"""Progress lines during training."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from tpbench.measure.session import Context
from tpbench.workloads.train_step.problem import TrainStep


class ProgressLines:
    """Lines on rank 0's stderr, one every `log_interval` steps: step, loss, tokens/s of wall time since the last line.

    They are written between steps, so they cost no measured time.
    """

    def __init__(self, problem: TrainStep, context: Context) -> None:
        self.context, self.interval = context, problem.log_interval if context.rank == 0 else 0
        self.last_step = problem.warmup_steps + problem.steps
        self.tokens_per_step = problem.tokens * problem.accumulate * context.dp_size
        self.reported_steps = 0
        self.reported_at_s = time.perf_counter()

    def report(self, steps_done: int, losses: Sequence[torch.Tensor]) -> None:
        """Write a line if one is due. `losses` are this replica's losses of the steps so far, on the device.

        A step after the measured ones, for a profile, gets no line.
        """
        if not self.interval or steps_done % self.interval or not self.reported_steps < steps_done <= self.last_step:
            return
        self.reported_steps = steps_done
        loss, now_s = float(losses[-1]), time.perf_counter()
        rate = self.interval * self.tokens_per_step / (now_s - self.reported_at_s)
        self.reported_at_s = now_s
        self.context.say(f"step {steps_done}/{self.last_step}: loss {loss:.4f}, {rate:.0f} tokens/s")
