"""What a person sees of a running sweep: a live table on a terminal, a line a cell elsewhere."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tpbench.launcher.failure import doing
from tpbench.launcher.plan import Cell
from tpbench.report.escape import printable

if TYPE_CHECKING:
    from tpbench.launcher.attempt import Attempt, Outcome

SHOWN = 12
"""Finished cells in the live table: more would push it off the screen."""

LOOK_S = 0.5
"""Between two looks at what running cells say."""

STYLES = {"ok": "green", "oom": "yellow", "skipped": "dim", "wrong": "red", "error": "red", "timeout": "red"}


@dataclass
class Running:
    """A cell that has begun."""

    cell: Cell
    where: str
    began: float
    saying: str = ""
    """What it is doing, by its rank 0."""


class Display:
    """Progress of one sweep. On a terminal it redraws when told to (`tick`): no thread, because the launcher forks."""

    def __init__(self, total: int, folder: Path) -> None:
        self.console = Console()
        self.folder = folder
        self.total = total
        self.done: list[tuple[Outcome, float]] = []
        self.running: dict[int, Running] = {}
        """By index."""
        self.explained: set[int] = set()
        """Cells that need no line of their own when they are done."""
        self.told_blocked = False
        self.looked = -LOOK_S
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

    def start(self, cell: Cell, doing: str = "running") -> None:
        """A cell begins."""
        self.running[cell.index] = Running(cell, doing, time.monotonic())
        self.tick()

    def doing(self, cell: Cell, what: str) -> None:
        """Where a cell that began is now."""
        if cell.index in self.running:
            self.running[cell.index].where = what

    def saying(self, attempts: Iterable[Attempt]) -> None:
        """Look up what tries at work say that they are doing, where there is a terminal to show it on."""
        if self.live and time.monotonic() - self.looked > LOOK_S:
            self.looked = time.monotonic()
            shown = dict(list(self.running.items())[:SHOWN])
            for each in attempts:
                if each.cell.index in shown:
                    shown[each.cell.index].saying = doing(each.folder)

    def blocked(self, cell: Cell) -> None:
        """Nothing of the sweep can run, for others have the devices: said once."""
        if not self.told_blocked:
            self.told_blocked = True
            said = printable(f"waiting: other jobs on this host have the devices for {cell}")
            self.console.print(said, markup=False, highlight=False, soft_wrap=True)

    def explain(self, cells: Iterable[tuple[Cell, bool, str]]) -> None:
        """Say of each cell of a resumed sweep whether it runs, and why."""
        for cell, runs, why in cells:
            said = printable(f"{'runs' if runs else 'done'} {cell}: {why}")
            self.explained |= set() if runs else {cell.index}
            self.console.print(said, markup=False, highlight=False, soft_wrap=True)

    def retry(self, outcome: Outcome) -> None:
        """A try at a cell failed, and there will be another."""
        del self.running[outcome.cell.index]
        said = printable(f"again {outcome.cell}: {_result(outcome)}")
        self.console.print(said, markup=False, highlight=False, soft_wrap=True)

    def tick(self) -> None:
        """Redraw, where there is a terminal."""
        if self.live:
            self.progress.update(self.task, completed=len(self.done), description=self._time_left())
            self.live.update(Group(self._table(), self.progress), refresh=True)

    def finish(self, outcome: Outcome) -> None:
        """A cell has its row."""
        it = self.running.pop(outcome.cell.index, None)
        seconds = time.monotonic() - it.began if it else 0.0
        self.done.append((outcome, seconds))
        if not self.live and outcome.cell.index not in self.explained:
            print(f"[{len(self.done)}/{self.total}] {outcome.cell}: {_result(outcome)} ({seconds:.0f} s)", flush=True)
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
        rows = {str(outcome.row["row_id"]): outcome.frame for outcome in outcomes if outcome.frame is not None}
        if rows:
            show(pivot_text(pd.concat(list(rows.values()), ignore_index=True)), self.console)
        folders = sorted({f"{outcome.cell.job.output_dir}/rows" for outcome in outcomes})
        print(f"{len(rows)} row{'s' * (len(rows) != 1)} in {', '.join(folders)}; logs in {self.folder}", flush=True)
        if left := [outcome for outcome in outcomes if outcome.frame is None]:
            sweeps = sorted({str(outcome.sweep) for outcome in left})  # earlier ones, of jobs that were at work already
            collect = "; ".join(shlex.join(["scripts/collect.py", each]) for each in sweeps)
            print(f"{len(left)} jobs are left to Slurm: {collect} or the same command with resume=true collects them")

    def _time_left(self) -> str:
        """By the cells that ran. One that already took longer than those did says nothing of its end: then it is `more
        than` what the others take, or nothing at all."""
        ran = [seconds for outcome, seconds in self.done if outcome.status != "skipped" and seconds > 0.5]
        if not ran:
            return ""
        usual = sum(ran) / len(ran)
        running = [usual - (time.monotonic() - it.began) for it in self.running.values()]
        waiting = self.total - len(self.done) - len(running)
        left = (waiting * usual + sum(max(each, 0) for each in running)) / max(1, len(running))
        if left < 1:
            return ""
        about = "about" if min(running, default=0) >= 0 else "more than"
        return f"{about} {left / 60:.0f} min left" if left > 90 else f"{about} {left:.0f} s left"

    def _table(self, shown: int = SHOWN) -> Table:
        table = Table(box=None, padding=(0, 1))
        for column in ("cell", "job", "result", "s"):
            table.add_column(column, justify="right" if column in ("cell", "s") else "left", overflow="fold")
        if len(self.done) > shown:
            table.add_row("", f"({len(self.done) - shown} before)", "", "")
        for outcome, seconds in self.done[-shown:]:
            style = STYLES.get(outcome.status, "")
            result = f"[{style}]{escape(_result(outcome))}[/]"
            table.add_row(str(outcome.cell.index), escape(str(outcome.cell)), result, f"{seconds:.0f}")
        for it in list(self.running.values())[:shown]:
            at = ": ".join(each for each in (it.where, printable(it.saying)) if each)
            table.add_row(str(it.cell.index), escape(str(it.cell)), escape(at), f"{time.monotonic() - it.began:.0f}")
        return table


def _result(outcome: Outcome) -> str:
    """A line: the time if there is one, else what stands in its place."""
    row = outcome.row
    said = f"{row['status']}: {row['reason']}" if row["reason"] else str(row["status"])
    if outcome.frame is None:
        return printable(said)
    if outcome.status == "ok":
        said = f"ok {row['time_ms']:.3f} ms" + (" (interpreted: no measurement)" if row["interpreted"] else "")
    return printable(f"{said} ({outcome.note})" if outcome.note else said)
