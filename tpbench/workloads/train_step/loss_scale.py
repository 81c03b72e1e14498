"""Dynamic loss scaling for fp16."""

from __future__ import annotations

import torch
from torch import Tensor


class LossScale:
    """A dynamic factor on the loss that keeps fp16 gradients out of the subnormal range.

    Source: Micikevicius et al. 2018, arXiv:1710.03740, section 3.2. If a gradient overflows, the factor is halved and
    the step is skipped. After `patience` steps without an overflow the factor is doubled.
    """

    def __init__(self, factor: float = 2.0**16, patience: int = 2000) -> None:
        self.factor = self.used = factor
        """`factor` applies to the next step, `used` to the step that `finite` was last asked about."""
        self.patience, self.steps_without_overflow = patience, 0

    def finite(self, norm: Tensor) -> bool:
        """Return whether the gradient norm is finite, so that the step counts, and adjust the factor for the next step.

        The norm is that of all ranks' gradients, so all ranks decide alike. Waits for the device.
        """
        self.used = self.factor
        if not bool(torch.isfinite(norm)):
            self.factor, self.steps_without_overflow = self.factor / 2, 0
            return False
        self.steps_without_overflow += 1
        if self.steps_without_overflow == self.patience:
            self.factor, self.steps_without_overflow = self.factor * 2, 0
        return True
