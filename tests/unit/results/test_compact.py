"""Merging row files: nothing is lost, nothing is seen twice, even if processes read, write or die meanwhile."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

import tpbench
from tests.support.launcher_rows import cell, measured
from tpbench.files import lock
from tpbench.launcher.attempt import new_task, store
from tpbench.results.compact import Busy, compact, main
from tpbench.results.write import RowExists, row_exists


def fill(folder: Path, rows: int, status: str = "ok", seed: int = 0) -> None:
    for index in range(rows):
        measured(cell(index, folder, seed=seed + index), status)


def seeds(folder: Path) -> list[int]:
    return sorted(tpbench.load(folder)["seed"])


def test_the_same_rows_from_fewer_files(tmp_path: Path) -> None:
    fill(tmp_path, 20)
    before = tpbench.load(tmp_path)
    report = compact(tmp_path)
    assert (report.rows, report.files_before, report.files_after) == (20, 20, 1)
    assert tpbench.load(tmp_path).equals(before)
    fill(tmp_path, 5, seed=20)
    assert compact(tmp_path).files_after == 1
    assert seeds(tmp_path) == list(range(25))
    assert compact(tmp_path).files_before == 1


def test_a_merged_row_still_exists_for_those_who_would_write_it(tmp_path: Path) -> None:
    tasks = [new_task(cell(index, tmp_path, seed=index).job, tmp_path) for index in range(2)]
    for task in tasks:
        store(task.result("ok"), task.job, tmp_path)
    compact(tmp_path)
    assert row_exists(tmp_path, tasks[0].row_id)
    with pytest.raises(RowExists):
        store(tasks[0].result("error", "late"), tasks[0].job, tmp_path)
    assert len(tpbench.load(tmp_path)) == 2


def test_a_torn_last_line_of_the_index_costs_no_row(tmp_path: Path) -> None:
    fill(tmp_path, 2)
    compact(tmp_path)
    index = tmp_path / "rows" / ".compacted"
    index.write_bytes(index.read_bytes()[:-5])
    task = new_task(cell(0, tmp_path, seed=7).job, tmp_path)
    store(task.result("ok"), task.job, tmp_path)
    compact(tmp_path)
    assert not (tmp_path / "rows" / f"{task.row_id}.parquet").exists()
    assert row_exists(tmp_path, task.row_id)


def test_what_may_be_taken_back_or_is_not_ours_stays(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    fill(tmp_path, 2, "error", seed=10)
    (tmp_path / "rows" / "broken.parquet").write_bytes(b"PAR1 not really")
    report = compact(tmp_path)
    assert report.rows == 3
    assert len(list((tmp_path / "rows").glob("*.parquet"))) == 4
    assert any("broken.parquet" in each for each in report.complaints)
    with pytest.warns(UserWarning, match=r"broken\.parquet"):
        assert len(tpbench.load(tmp_path)) == 5


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    fill(tmp_path, 2)
    with (tmp_path / "rows/.compacting").open("a") as file:
        assert lock(file.fileno())
        with pytest.raises(Busy):
            compact(tmp_path)


def test_a_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    fill(tmp_path, 2)
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert main([str(tmp_path)]) == 1
    assert "this file system has no locks: No locks available" in capsys.readouterr().err
    assert seeds(tmp_path) == [0, 1]


def test_a_renamed_file_and_files_of_other_folders_stay(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    first, *_ = sorted((tmp_path / "rows").glob("*.parquet"))
    first.rename(first.with_name("kept.parquet"))
    (tmp_path / "rows/inner").mkdir()
    second = sorted((tmp_path / "rows").glob("2*.parquet"))[0]
    (tmp_path / "rows/inner" / second.name).write_bytes(second.read_bytes())
    report = compact(tmp_path)
    assert (report.rows, report.files_before, report.files_after) == (3, 3, 2)
    assert (tmp_path / "rows/kept.parquet").exists() and (tmp_path / "rows/inner" / second.name).exists()
