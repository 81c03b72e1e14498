"""The file protocol of interleaved cells: cells of one problem are measured in rounds, in ABBA order.

Rank 0 of a cell writes a request `N.request` into a folder of the cell and waits for the launcher's answer `N.grant`.
A cell that waits keeps its inputs in memory and runs nothing.
"""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path

FOLDER = "interleaving"
"""Name of the protocol's folder, inside the cell's folder."""

POLL_S = 0.005


class RoundRequest(StrEnum):
    """A cell's request after a round."""

    MORE = "more"
    """The cell's medians are not precise enough yet."""
    ENOUGH = "enough"
    """The cell's medians are precise. It runs further rounds while other cells need more: all get equally many."""
    NO_MORE = "no more"
    """The cell's time budget or its number of iterations is used up."""


class InterleavedRank:
    """The cell's side of the protocol, used by its rank 0."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, 0

    def request_round(self, request: RoundRequest) -> bool:
        """Send a request and wait for the grant. Return whether to run a round: False means to finish the cell."""
        _write_atomically(self.folder / f"{self.number}.request", request)
        grant = self.folder / f"{self.number}.grant"
        self.number += 1
        while not grant.exists():
            time.sleep(POLL_S)
        return grant.read_text() == "measure"


class InterleavingQueue:
    """The launcher's side of the protocol, for one cell."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder, self.number = folder, 0

    def pending_request(self) -> RoundRequest | None:
        """Return the request that waits for a grant, or None while the cell runs."""
        file = self.folder / f"{self.number}.request"
        return RoundRequest(file.read_text()) if file.exists() else None

    def grant(self, last: bool) -> None:
        """Let the cell run: a round, or its end if this is the last grant."""
        _write_atomically(self.folder / f"{self.number}.grant", "finish" if last else "measure")
        self.number += 1


def _write_atomically(file: Path, text: str) -> None:
    """Write a file such that a reader sees either all of it or no file."""
    temporary = file.with_name(f".{file.name}")
    temporary.write_text(text)
    temporary.rename(file)
