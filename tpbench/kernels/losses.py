"""The entropy losses by name. Other modules of tpbench take the names from here; importing it needs no torch."""

from __future__ import annotations

import typing
from typing import Literal

Loss = Literal["cross_entropy", "soft_cross_entropy", "reverse_kl", "forward_kl"]
"""The losses that training minimises, and that the workload `entropy_loss` measures."""
LOSSES: tuple[str, ...] = typing.get_args(Loss)

KernelLoss = Literal["cross_entropy", "soft_cross_entropy", "reverse_kl", "forward_kl", "logprob"]
"""These losses, and the label's log-probability, which policy optimisation uses."""
KERNEL_LOSSES: tuple[str, ...] = typing.get_args(KernelLoss)
LABEL_LOSSES = ("cross_entropy", "logprob")
"""The losses whose target is a label of each row."""
