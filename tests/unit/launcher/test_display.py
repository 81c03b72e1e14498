"""Progress of a sweep: phases of running cells, and submitted jobs."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.launcher_rows import cell
from tpbench.launcher import display, interrupts
from tpbench.launcher.attempt import Attempt
from tpbench.launcher.planning.plan import Cell, distinguish


def ended(of: Cell, sweep: Path, note: str | None = None) -> Attempt:
    """Return an attempt that has ended."""
    return replace(Attempt.plan(of, sweep, {}), note=note)


def test_cells_that_differ_in_their_seed_have_different_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    one, two = distinguish([cell(0, tmp_path, seed=1), cell(1, tmp_path, seed=2)])
    shown = display.Display(2, tmp_path)
    shown.show(one)
    shown.show(two)
    print(shown.text())
    shown.finish(ended(one, tmp_path))
    lines = capsys.readouterr().out.splitlines()
    assert [line.count("seed=1") for line in lines] == [1, 0, 0, 1]
    assert [line.count("seed=2") for line in lines] == [0, 1, 0, 0]


def test_the_time_left_counts_only_cells_that_ran(tmp_path: Path) -> None:
    shown = display.Display(4, tmp_path)
    shown.began -= 60.0
    cells = [cell(at, tmp_path, seed=at) for at in range(3)]
    shown.finish(ended(cells[0], tmp_path), quietly=True)
    shown.finish(ended(cells[1], tmp_path), quietly=True)
    shown.show(cells[2])
    shown.finish(ended(cells[2], tmp_path), quietly=True)
    assert shown.text() == "3 of 4 cells in 1.0 min, about 1.0 min left"


def test_without_a_terminal_a_line_says_what_a_sweep_waits_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sweep that asks Slurm prints the line, too, because each sleep of the launcher calls `tick`."""
    cells = [cell(at, tmp_path, seed=at) for at in range(2)]
    with display.Display(2, tmp_path) as shown, interrupts.noted(shown.tick):
        for of in cells:
            shown.show(of, "job 7: PENDING (Resources)")
        interrupts.check()
        assert not capsys.readouterr().out
        shown.printed -= display.QUIET_S
        interrupts.sleep(0)
        interrupts.check()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("0 of 2 cells in 0.0 min; triton_tp ") and line.endswith(
        ": job 7: PENDING (Resources) for 0 s (and 1 more)"
    )


def test_the_time_of_a_job_begins_when_it_runs(tmp_path: Path) -> None:
    shown = display.Display(1, tmp_path)
    for status, seconds in (("PENDING", 60), ("RUNNING", 0), ("COMPLETED", 30)):
        shown.show(of := cell(0, tmp_path), f"job 7: {status}")
        shown.running[0] = (of, shown.running[0][1], shown.running[0][2] - seconds)
        assert f": job 7: {status} for {seconds} s" in shown.text()


def test_submitted_jobs_are_collected_from_their_own_sweeps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = display.Display(3, tmp_path / "this")
    left = [ended(cell(at, tmp_path), tmp_path / name) for at, name in enumerate(["one", "two", "one"])]
    shown.end(left)
    collect = "; ".join(f"python -m tpbench collect {tmp_path}/{name}" for name in ("one", "two"))
    assert f"cells left to Slurm: 3; {collect} or the same" in capsys.readouterr().out
