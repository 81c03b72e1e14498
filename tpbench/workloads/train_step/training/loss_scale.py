"""Dynamic loss scaling for fp16."""

from __future__ import annotations

import torch
from torch import Tensor

FIRST_FACTOR = 2.0**16
PATIENCE = 2000
"""Steps without an overflow after which the factor is doubled."""


class LossScale:
    """A dynamic factor on the loss that keeps fp16 gradients out of the subnormal range. It stays on the device.

    Source: Micikevicius et al. 2018, arXiv:1710.03740, section 3.2. If a gradient overflows, the factor is halved and
    the step is skipped. After `patience` steps without an overflow the factor is doubled.
    """

    def __init__(
        self, factor: float = FIRST_FACTOR, patience: int = PATIENCE, device: torch.device | None = None
    ) -> None:
        self.factor = torch.full((), factor, device=device)
        """The factor of the next step, an fp32 scalar."""
        self.used = self.factor.clone()
        """The factor of the step that `finite` was last asked about."""
        self.patience = patience
        self._steps_without_overflow = torch.zeros((), dtype=torch.int32, device=device)

    def finite(self, norm: Tensor) -> Tensor:
        """Return whether the gradient norm is finite, so that the step counts, and adjust the factor for the next step.

        The result is a boolean scalar on the device. The norm is that of all ranks' gradients, so all ranks decide
        alike.
        """
        self.used = self.factor.clone()
        finite = torch.isfinite(norm)
        overflow = torch.logical_not(finite).float()
        torch._amp_update_scale_(self.factor, self._steps_without_overflow, overflow, 2.0, 0.5, self.patience)
        return finite
