"""The measured block caps that block_cap="auto" stands for: the fastest by algorithm, loss and columns.

Nothing is tuned while a program runs: no timed region contains tuning, and all ranks use the same cap. The file
`block_caps.json` names the compared caps and the machine. `scripts/choose_block_caps.py` makes it from the rows of
`-m +experiment=block_cap_sweep`.
"""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any

FILE = "block_caps.json"


@functools.cache
def winners() -> list[dict[str, Any]]:
    """Return all entries of the file: the fastest block cap for an algorithm, a loss and the columns of a rank."""
    entries: list[dict[str, Any]] = json.loads((resources.files(__package__) / FILE).read_text())["winners"]
    return entries


@functools.cache
def measured_cap(algorithm: str, loss: str, share: int) -> int:
    """Return the winner of the narrowest measured width that `share` fits into, or else of the widest.

    share: columns of each rank if the vocabulary is split evenly, so that all ranks choose the same cap. Unmeasured:
    jsd, which has the caps of reverse_kl.
    """
    loss = "reverse_kl" if loss == "jsd" else loss
    candidates = [winner for winner in winners() if (winner["algorithm"], winner["loss"]) == (algorithm, loss)]
    winner = min(candidates, key=lambda winner: (winner["columns"] < share, abs(winner["columns"] - share)))
    return int(winner["block_cap"])
