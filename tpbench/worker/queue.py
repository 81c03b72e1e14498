"""Queue of tasks for ranks that stay: a folder of numbered files."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.005


@dataclass(frozen=True)
class QueuedTask:
    """The next thing that a rank has to do."""

    task_file: Path
    reusable: bool
    """True if the process that runs this task may run the next one too."""


@dataclass(frozen=True)
class TaskQueue:
    """Tasks for the ranks of one torchrun, numbered from 0. The launcher puts them, each rank takes every one."""

    folder: Path

    def put(self, number: int, task: QueuedTask | None) -> None:
        """Add a task. None tells the ranks to release their devices."""
        temporary = self.folder / f".{number}.task"
        temporary.write_text(json.dumps([str(task.task_file), task.reusable] if task else None))
        temporary.rename(self.folder / f"{number}.task")

    def wait(self, number: int) -> QueuedTask | None:
        """Return the task with that number, as soon as it is there."""
        file = self.folder / f"{number}.task"
        while not file.exists():
            time.sleep(POLL_S)
        content = json.loads(file.read_text())
        return QueuedTask(Path(content[0]), content[1]) if content else None

    def finish(self, number: int, rank: int) -> None:
        """Note that a rank has finished its part of a task."""
        (self.folder / f"{number}.{rank}.done").touch()

    def finished(self, number: int, rank: int) -> bool:
        """Return True if a rank has finished its part of a task."""
        return (self.folder / f"{number}.{rank}.done").exists()

    def done(self, number: int, ranks: int) -> bool:
        """Return True if all ranks have finished a task."""
        return all(self.finished(number, rank) for rank in range(ranks))
