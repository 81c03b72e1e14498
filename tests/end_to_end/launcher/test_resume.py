"""Resumed sweeps: every cell ends with one row, whichever process is killed, and when."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tpbench as package
from tests.support.command import ROOT, Running, environment, tpbench
from tests.support.held_ranks import Held
from tests.support.launcher_rows import cell
from tpbench.launcher.devices import CellLocks
from tpbench.launcher.slurm import submitted

CELLS = ("-m", "variant=pytorch_tp_manual", "seed=1,2,3,4", "tokens=16", "vocab=64", "tp_size=1", "measure=quick",
         "min_iterations=3", "max_iterations=3", "device=cpu")  # fmt: skip


def test_a_failure_goes_when_the_cell_has_another_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So does a later failure, and the sweeps of both are still collected."""
    sweep = (*CELLS[:2], "seed=1,2", *CELLS[3:])
    held = Held(tmp_path)
    running = Running(*sweep, cwd=tmp_path, env=held.env)
    running.wait_for("importing torch", rank=0).kill()
    held.release()
    assert running.end()[0] == 1
    failed, other = package.load(tmp_path / "outputs").to_dict("records")
    assert (failed["status"], other["status"]) == ("error", "ok")
    file = tmp_path / "outputs/rows" / f"{failed['row_id']}.parquet"
    content = file.read_bytes()

    def rows_after_resuming(said: str) -> list[str]:
        done = tpbench(*sweep, "resume=true", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert said in done.stdout
        return [str(each) for each in package.load(tmp_path / "outputs")["status"]]

    assert rows_after_resuming("failed: error, ") == ["ok", "ok"]
    file.write_bytes(content)  # as a sweep leaves it that is killed with both rows on disk
    assert rows_after_resuming("measured before") == ["ok", "ok"]
    (sweep_of_row,) = package.load(tmp_path / "outputs", status="ok", seed=1)["sweep_id"]
    assert submitted.main([str(tmp_path / "outputs/sweeps" / failed["sweep_id"])]) == 0
    said = capsys.readouterr().out
    assert f"ok (sweep {sweep_of_row})" in said and "2 cells: 2 done, 0 of them failed" in said
    one = (*CELLS[:2], "seed=1", *CELLS[3:])
    held.hold.touch()
    assert Running(*one, "timeout_s=1", cwd=tmp_path, env=held.env).end()[0] == 1
    (timeout,) = package.load(tmp_path / "outputs", status="timeout").to_dict("records")
    assert rows_after_resuming("measured before") == ["ok", "ok"]
    assert submitted.main([str(tmp_path / "outputs/sweeps" / timeout["sweep_id"])]) == 0
    assert f"ok (sweep {sweep_of_row})" in capsys.readouterr().out


def test_locks_exclude_other_processes_and_end_with_their_owner(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    one, two = cell(0, tmp_path), cell(1, tmp_path, seed=1)
    ours = CellLocks([str(tmp_path)])
    assert ours.acquire(one.job)
    probe = (
        "from pathlib import Path; from tests.support.launcher_rows import cell;"
        "from tpbench.launcher.devices import CellLocks;"
        f"folder = Path({str(tmp_path)!r}); claims = CellLocks([str(folder)]);"
        "print(claims.acquire(cell(0, folder).job), claims.acquire(cell(1, folder, seed=1).job), flush=True); input()"
    )
    other = subprocess.Popen([sys.executable, "-c", probe], cwd=ROOT, env=environment(), text=True,
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    assert other.stdout is not None
    assert other.stdout.readline().split() == ["False", "True"]
    assert not ours.acquire(two.job)
    other.kill()
    other.wait()
    assert ours.acquire(two.job)
    ours.close()
