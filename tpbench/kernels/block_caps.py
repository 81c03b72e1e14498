"""The measured block caps that block_cap="auto" stands for: the fastest by algorithm, loss and columns.

Nothing is tuned while a program runs: no timed region contains tuning, and all ranks use the same cap. The file
`block_caps.json` names the compared caps and the machine. `scripts/choose_block_caps.py` makes it from the rows of
`-m +experiment=block_cap_sweep`.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources

FILE = "block_caps.json"


@dataclass(frozen=True)
class Winner:
    """The fastest block cap for one algorithm, loss and width."""

    algorithm: str
    loss: str
    columns: int
    """Columns that a rank held."""
    block_cap: int
    device_ms: float
    tried: tuple[int, ...]
    """The measured caps. A single one was measured, but not compared."""
    source: str
    """The rows with the measurements."""


@functools.cache
def winners() -> tuple[Winner, ...]:
    """Return all entries of the file."""
    entries = json.loads((resources.files(__package__) / FILE).read_text(encoding="utf-8"))["winners"]
    return tuple(Winner(**{**entry, "tried": tuple(entry["tried"])}) for entry in entries)


@functools.cache
def measured_cap(algorithm: str, loss: str, share: int) -> int:
    """Return the winner of the narrowest measured width that `share` fits into, or else of the widest.

    share: columns of each rank if the vocabulary is split evenly, so that all ranks choose the same cap. A loss that
    was not measured uses the caps of a loss with as many logits per column.
    """
    alike = [winner for winner in winners() if winner.algorithm == algorithm]
    candidates = [winner for winner in alike if winner.loss == loss] or [
        winner for winner in alike if (winner.loss == "cross_entropy") == (loss == "cross_entropy")
    ]
    return min(candidates, key=lambda winner: (winner.columns < share, abs(winner.columns - share))).block_cap
