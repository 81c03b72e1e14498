"""Progress of a sweep: phases of running cells, and submitted jobs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.launcher_rows import cell, measured
from tpbench.launcher import display
from tpbench.launcher.attempt import Attempt
from tpbench.launcher.planning.plan import Cell, distinguish
from tpbench.results.read import load, plain_rows


def ended(of: Cell, sweep: Path, row: dict[str, Any] | None = None, note: str | None = None) -> Attempt:
    """Return an attempt with its row."""
    return replace(Attempt.plan(of, sweep, {}, number=1), row=row, note=note)


def test_cells_that_differ_in_their_seed_have_different_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    one, two = distinguish([cell(0, tmp_path, seed=1), cell(1, tmp_path, seed=2)])
    shown = display.Display(2, tmp_path)
    shown.print_decisions([(one, True, "missing"), (two, True, "missing")])
    shown.start(one)
    shown.start(two)
    shown.console.print(shown._table())
    shown.retry(ended(two, tmp_path, note="it broke"))
    shown.finish(ended(one, tmp_path))
    shown.blocked(two)
    lines = capsys.readouterr().out.splitlines()
    assert [line.count("seed=1") for line in lines] == [1, 0, 1, 0, 0, 1, 0]
    assert [line.count("seed=2") for line in lines] == [0, 1, 0, 1, 1, 0, 1]


def test_submitted_jobs_are_collected_from_their_own_sweeps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = display.Display(3, tmp_path / "this")
    left = [ended(cell(at, tmp_path), tmp_path / name) for at, name in enumerate(["one", "two", "one"])]
    shown.end(left)
    collect = "; ".join(f"python -m tpbench collect {tmp_path}/{name}" for name in ("one", "two"))
    assert f"3 jobs are left to Slurm: {collect} or the same" in capsys.readouterr().out


def test_a_failed_cell_shows_the_path_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    log = tmp_path / "sweeps/0/torchrun/attempt_0/1/stderr.log"
    log.parent.mkdir(parents=True)
    log.touch()
    ends = [("error", "rank 1: ValueError: [no]"), ("timeout", "still running after 5 s"), ("oom", "rank 0: memory")]
    rows: list[dict[str, Any]] = []
    for index, (status, reason) in enumerate(ends):
        measured(cell(index, tmp_path / "out", seed=index), status, reason, log_dir=str(tmp_path / f"sweeps/{index}"))
    rows = plain_rows(load(tmp_path / "out"))
    cells = distinguish([cell(index, tmp_path / "out", seed=index) for index in range(3)])
    shown = display.Display(3, tmp_path)
    for each, row in zip(cells, rows, strict=True):
        shown.finish(ended(each, tmp_path, row))
    lines = [line for line in capsys.readouterr().out.splitlines() if "the log is" in line]
    assert lines == [
        "the log is sweeps/0/torchrun/attempt_0/1/stderr.log",
        "the log is sweeps/1",
    ]


def test_an_interrupted_sweep_prints_the_command_line_as_it_was_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    display.Display(4, tmp_path).interrupted(1, ["-m", "tokens=64,128", "block_cap=4096", "resume=false"])
    assert capsys.readouterr().out.splitlines()[-1] == (
        "    python -m tpbench -m tokens=64,128 block_cap=4096 resume=true"
    )
