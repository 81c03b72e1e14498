"""Cells of one problem that are measured in turns: a round of one, a round of the next, and back again.

The launcher gives the turns and a cell's rank 0 asks for them, through files in a folder of the cell's own. Whoever has
no turn waits, with its inputs in place and nothing running.
"""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path

FOLDER = "turns"
"""In the folder of a cell."""

POLL_S = 0.005


class Wants(StrEnum):
    """What a cell says of further rounds when it gives its turn back."""

    MORE = "more"
    """Its medians are not known well enough yet."""
    ENOUGH = "enough"
    """They are; it goes on as long as others want more, so that all have the same rounds."""
    NO_MORE = "no more"
    """Its time or its iterations are used up."""


class TurnTaker:
    """The cell's side."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, 0

    def next(self, wants: Wants) -> bool:
        """Give the turn back and wait for the next. False when that is the last one: to finish, not to measure."""
        _put(self.folder / f"{self.number}.asked", wants)
        given = self.folder / f"{self.number}.given"
        self.number += 1
        while not given.exists():
            time.sleep(POLL_S)
        return given.read_text() == "measure"


class TurnGiver:
    """The launcher's side, of one cell."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder, self.number = folder, 0

    def asked(self) -> Wants | None:
        """What the cell wants, or None while it has its turn."""
        file = self.folder / f"{self.number}.asked"
        return Wants(file.read_text()) if file.exists() else None

    def give(self, last: bool) -> None:
        """It is the cell's turn."""
        _put(self.folder / f"{self.number}.given", "finish" if last else "measure")
        self.number += 1


def _put(file: Path, text: str) -> None:
    """Whole or not there."""
    temporary = file.with_name(f".{file.name}")
    temporary.write_text(text)
    temporary.rename(file)
