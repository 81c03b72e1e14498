"""The entropy losses by name. Other modules of tpbench take the names from here; importing it needs no torch."""

from __future__ import annotations

import typing
from typing import Literal

Loss = Literal["cross_entropy", "soft_cross_entropy", "reverse_kl", "forward_kl"]
LOSSES: tuple[str, ...] = typing.get_args(Loss)
