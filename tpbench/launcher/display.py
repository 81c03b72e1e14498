"""Progress of a running sweep: a line for each cell that has ended, and the cells that run or wait now.

A terminal shows the latter all the time. Elsewhere, as in a log, they are a line whenever nothing was printed for long.
"""

import contextlib
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from tpbench.launcher.attempt import Attempt
from tpbench.launcher.planning.plan import Cell
from tpbench.suggestions import printable, printable_reason

QUIET_S = 12.0
"""Longest time without a line if the output isn't a terminal."""
DRAWN_S = 0.1
"""Least time between two drawings of a terminal."""
MAX_REASON, MAX_LENGTH = 600, 2000
"""Most characters of a reason, whose first third names the failed line, and of a line with a path."""


class Display:
    """Progress of one sweep. A terminal is redrawn in `tick`, and not by a thread, because the launcher forks."""

    def __init__(self, total: int, folder: Path) -> None:
        self.console, self.folder, self.total = Console(), folder, total
        self.done, self.ran, self.began = 0, 0, time.monotonic()
        self.running: dict[int, tuple[Cell, str, float]] = {}
        """Running cells by index, with their status and the time at which they began."""
        self.followed: dict[Path, int] = {}
        """Files that are followed, each with the number of its characters that were printed."""
        self.printed = self.began
        """When a line was printed, or the terminal drawn."""
        self.live = Live(console=self.console, auto_refresh=False, transient=True) if self.console.is_terminal else None

    def __enter__(self) -> Self:
        if self.live:
            self.live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live:
            self.live.stop()

    def show(self, cell: Cell, status: str = "running") -> None:
        """Show a cell that begins, or its new status. Once a job runs, its time in Slurm's queue doesn't count."""
        _, before, began = self.running.get(cell.index, (cell, "", time.monotonic()))
        if status == "running" or (status.endswith("RUNNING") and not before.endswith("RUNNING")):
            began = time.monotonic()
        self.running[cell.index] = (cell, status, began)

    def note(self, line: str, max_length: int = 200) -> None:
        self.printed = time.monotonic()
        self.console.print(printable(line, max_length), markup=False, highlight=False, soft_wrap=True)

    def follow(self, file: Path, prefix: str = "") -> None:
        """Print the lines of a file, if it exists, that were added since the last call."""
        with contextlib.suppress(FileNotFoundError):
            text = file.read_text(encoding="utf-8")
            whole_lines = text[: text.rfind("\n") + 1]
            for line in whole_lines[self.followed.get(file, 0) :].splitlines():
                self.note(prefix + line)
            self.followed[file] = len(whole_lines)

    def tick(self) -> None:
        """Draw the running cells and the time left on a terminal. Elsewhere print them after a long silence."""
        silent_s = time.monotonic() - self.printed
        if self.live and silent_s > DRAWN_S:
            self.printed = time.monotonic()
            self.live.update(Text(self.text(), no_wrap=True, overflow="ellipsis"), refresh=True)
        elif not self.live and silent_s > QUIET_S:
            *cells, sweep = self.text().splitlines()
            others = f" (and {len(self.running) - 1} more)" if len(self.running) > 1 else ""
            self.note(f"{sweep}; {cells[0]}{others}" if cells else sweep, MAX_LENGTH)

    def text(self) -> str:
        """Return a line for each running cell, and one for the sweep."""
        now = time.monotonic()
        lines = [f"{cell}: {status} for {now - began:.0f} s" for cell, status, began in self.running.values()]
        minutes = (now - self.began) / 60  # cells that were skipped, or measured before, took none of them
        rest = f", about {minutes / self.ran * (self.total - self.done):.1f} min left" if self.ran else ""
        return "\n".join([*lines[:12], f"{self.done} of {self.total} cells in {minutes:.1f} min{rest}"])

    def finish(self, attempt: Attempt, quietly: bool = False) -> None:
        """Count a cell that has ended, and print its result unless `quietly`."""
        running = self.running.pop(attempt.cell.index, None)
        seconds = time.monotonic() - running[2] if running else 0.0
        self.done += 1
        self.ran += running is not None
        if not quietly:
            place, cell = f"[{self.done}/{self.total}]", printable(str(attempt.cell))
            self.note(f"{place} {cell}: {_result(attempt)} ({seconds:.0f} s)", MAX_LENGTH)
            if attempt.row is not None and attempt.status in ("error", "timeout"):
                folder = Path(attempt.row["log_dir"])
                if not any(folder.rglob("*.log")):  # a Slurm job whose set-up failed has started no rank
                    folder = self.folder / "slurm"
                self.note(f"the logs are in {folder}", MAX_LENGTH)
        self.tick()

    def interrupted(self, finished: int, arguments: Sequence[str]) -> None:
        """Print what is kept, and the command that goes on."""
        if self.live:
            self.live.stop()
        again = shlex.join([*(word for word in arguments if not word.startswith("resume=")), "resume=true"])
        with contextlib.suppress(OSError):  # the terminal may be gone
            self.note(f"Interrupted: {finished} of {self.total} cells have their rows. Run the others with")
            print(f"    python -m tpbench {printable(again, 100_000)}", flush=True)

    def end(self, attempts: Sequence[Attempt]) -> None:
        """Print the sweep's table and the folder of its rows."""
        from tpbench.report.pivot import pivot
        from tpbench.results.read import frame_of
        from tpbench.tables import as_text

        if self.live:
            self.live.stop()
        rows = {str(attempt.row["row_id"]): attempt.row for attempt in attempts if attempt.row is not None}
        if rows:
            table = pivot(frame_of(rows.values()))
            # The lines of the cells have had the reasons of failures.
            notes = [note for note in table.notes if getattr(note, "kind", "dim") == "dim"]
            self.console.print(as_text(replace(table, notes=notes)), soft_wrap=True)
        folders = sorted({f"{attempt.cell.job.output_dir}/rows" for attempt in attempts})
        # Without an attempt of its own, as when it resumes, the sweep leaves no folder.
        logs = f"; logs in {self.folder}" if any(self.folder.glob("*/")) else ""
        print(f"{len(rows)} row{'s' * (len(rows) != 1)} in {', '.join(folders)}{logs}", flush=True)
        if submitted := [attempt for attempt in attempts if attempt.row is None]:
            sweeps = sorted({str(attempt.folder.parent) for attempt in submitted})  # also earlier sweeps
            collect = "; ".join(shlex.join(["python", "-m", "tpbench", "collect", sweep]) for sweep in sweeps)
            left = f"cells left to Slurm: {len(submitted)}"
            print(f"{left}; {collect} or the same command with resume=true collects them")


def _result(attempt: Attempt) -> str:
    """Return one line: the time of a cell that was measured, else its status and reason."""
    if attempt.row and attempt.status == "ok":
        mark = " (interpreted: no measurement)" if attempt.row["interpreted"] else ""
        return f"ok {attempt.row['time_ms']:.3f} ms{mark}"
    return printable_reason(f"{attempt.status}: {attempt.reason}" if attempt.reason else attempt.status, MAX_REASON)
