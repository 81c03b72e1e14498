"""Slurm's commands as shell scripts, for tests that need their answers and no cluster."""

from pathlib import Path

import pytest


class SlurmCommands:
    """Commands that answer with fixed lines, and the only ones on the PATH."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **lines: str) -> None:
        """`lines`: by the command's name, the shell lines that it runs."""
        self.folder, self.log = folder / "commands", folder / "commands" / "asked"
        self.folder.mkdir()
        self.log.touch()
        monkeypatch.setenv("PATH", str(self.folder))
        self.answer(**{"sinfo": "echo 'tests*|2|8|(null)'", **lines})

    def answer(self, **lines: str) -> None:
        """Change what commands answer."""
        for name, script in lines.items():
            (self.folder / name).write_text(f"#!/bin/sh\necho {name} $* >>{self.log}\n{script}\n")
            (self.folder / name).chmod(0o755)

    @property
    def asked(self) -> list[str]:
        """The lines with which commands were called, but for those that only describe the cluster."""
        return [line for line in self.log.read_text().splitlines() if not line.startswith("sinfo")]
