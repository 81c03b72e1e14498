"""What block_cap="auto" means: the fastest cap of those measured, by algorithm, loss and columns, from a file.

Nothing is tuned while a program runs, so that no timed region pays for it and ranks never differ. The file,
`block_caps.json`, says what each cap was compared with and on which machine; `scripts/choose_block_caps.py` makes it
from the rows of `-m +experiment=block_cap_sweep`.
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
    """The caps that were compared. One alone was not chosen, only measured."""
    source: str
    """Which rows."""


@functools.cache
def winners() -> tuple[Winner, ...]:
    """All entries of the file."""
    found = json.loads((resources.files(__package__) / FILE).read_text(encoding="utf-8"))["winners"]
    return tuple(Winner(**{**each, "tried": tuple(each["tried"])}) for each in found)


@functools.cache
def measured_cap(algorithm: str, loss: str, share: int) -> int:
    """The winner for the narrowest measured width that `share` fits into, or else for the widest.

    share: columns that each rank holds if the vocabulary is split evenly, so that all ranks choose alike. A loss that
    was not measured takes the caps of one that holds as many logits a column.
    """
    alike = [each for each in winners() if each.algorithm == algorithm]
    own = [each for each in alike if each.loss == loss] or [
        each for each in alike if (each.loss == "cross_entropy") == (loss == "cross_entropy")
    ]
    return min(own, key=lambda each: (each.columns < share, abs(each.columns - share))).block_cap
