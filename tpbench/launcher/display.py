"""What a person sees of a running sweep: a live table on a terminal, a line a cell elsewhere."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tpbench.launcher.plan import Cell
from tpbench.report.escape import plain

if TYPE_CHECKING:
    from tpbench.launcher.sweep import Outcome

SHOWN = 12
"""Finished cells in the live table: more would push it off the screen."""

STYLES = {"ok": "green", "oom": "yellow", "skipped": "dim", "wrong": "red", "error": "red", "timeout": "red"}


class Display:
    """Progress of one sweep. On a terminal it redraws when told to (`tick`): no thread, because the launcher forks."""

    def __init__(self, total: int, folder: Path) -> None:
        self.console = Console()
        self.folder = folder
        self.total = total
        self.done: list[tuple[Outcome, float]] = []
        self.current: Cell | None = None
        self.began = self.cell_began = time.monotonic()
        self.progress = Progress(
            TextColumn("cells"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        self.task = self.progress.add_task("", total=total)
        self.live = Live(console=self.console, auto_refresh=False, transient=True) if self.console.is_terminal else None

    def __enter__(self) -> Display:
        if self.live:
            self.live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live:
            self.live.stop()

    def start(self, cell: Cell) -> None:
        """A cell begins."""
        self.current, self.cell_began = cell, time.monotonic()
        self.tick()

    def tick(self) -> None:
        """Redraw, where there is a terminal."""
        if self.live:
            self.progress.update(self.task, completed=len(self.done), description=self._time_left())
            self.live.update(Group(self._table(), self.progress), refresh=True)

    def finish(self, outcome: Outcome) -> None:
        """A cell has its row."""
        seconds = time.monotonic() - self.cell_began
        self.done.append((outcome, seconds))
        self.current = None
        if not self.live:
            print(
                f"[{len(self.done)}/{self.total}] {outcome.cell.job}: {_result(outcome)} ({seconds:.0f} s)", flush=True
            )
        self.tick()

    def interrupted(self, finished: int, arguments: Sequence[str]) -> None:
        """Say what is kept and how to go on."""
        if self.live:
            self.live.stop()
        again = shlex.join([*(each for each in arguments if not each.startswith("resume=")), "resume=true"])
        self.console.print(
            f"Interrupted: {finished} of {self.total} cells have their rows. Run the others with\n"
            f"    python -m tpbench {again}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )

    def end(self, outcomes: Sequence[Outcome]) -> None:
        """The sweep's table, and where its rows are."""
        from tpbench.report.render import pivot_text, show

        if self.live:
            self.live.stop()
            if self.total > 1:
                self.console.print(self._table(self.total))
        rows = {str(outcome.row["row_id"]): outcome.frame for outcome in outcomes}
        show(pivot_text(pd.concat(list(rows.values()), ignore_index=True)), self.console)
        folders = sorted({f"{outcome.cell.job.output_dir}/rows" for outcome in outcomes})
        print(f"{len(rows)} rows in {', '.join(folders)}; logs in {self.folder}", flush=True)

    def _time_left(self) -> str:
        ran = [seconds for outcome, seconds in self.done if outcome.status != "skipped" and seconds > 0.5]
        if not ran:
            return ""
        left = (self.total - len(self.done)) * sum(ran) / len(ran) - (time.monotonic() - self.cell_began)
        return f"about {max(left, 0) / 60:.0f} min left" if left > 90 else f"about {max(left, 0):.0f} s left"

    def _table(self, shown: int = SHOWN) -> Table:
        table = Table(box=None, padding=(0, 1))
        for column in ("cell", "job", "result", "s"):
            table.add_column(column, justify="right" if column in ("cell", "s") else "left", overflow="fold")
        if len(self.done) > shown:
            table.add_row("", f"({len(self.done) - shown} before)", "", "")
        for outcome, seconds in self.done[-shown:]:
            style = STYLES.get(outcome.status, "")
            result = f"[{style}]{escape(_result(outcome))}[/]"
            table.add_row(str(outcome.cell.index), escape(str(outcome.cell.job)), result, f"{seconds:.0f}")
        if self.current is not None:
            seconds = time.monotonic() - self.cell_began
            table.add_row(str(self.current.index), escape(str(self.current.job)), "running", f"{seconds:.0f}")
        return table


def _result(outcome: Outcome) -> str:
    """A line: the time if there is one, else what stands in its place."""
    row = outcome.row
    said = f"{row['status']}: {row['reason']}" if row["reason"] else str(row["status"])
    if outcome.status == "ok":
        said = f"ok {row['time_ms']:.3f} ms" + (" (interpreted: no measurement)" if row["interpreted"] else "")
    return plain(f"{said} ({outcome.note})" if outcome.note else said)
