"""The exit codes of the ranks that failed, as torchrun saw them: a JSON file beside torchrun's log."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

_FILE = "failures.json"


@dataclass(frozen=True)
class RankFailure:
    """A rank that did not end with exit code 0."""

    rank: int
    local_rank: int
    exit_code: int
    """Negative: the number of the signal that killed the rank."""


def save_failures(failures: Sequence[RankFailure], folder: Path) -> None:
    """Write the failures to a file in that folder."""
    (folder / _FILE).write_text(json.dumps([asdict(failure) for failure in failures]))


def load_failures(folder: Path) -> list[RankFailure]:
    """Read the failures of the torchrun with that log folder. Empty if it left none, or was killed as it wrote them."""
    try:
        return [RankFailure(**failure) for failure in json.loads((folder / _FILE).read_text())]
    except (OSError, ValueError):
        return []
