"""The hand-over between launcher and ranks: what one writes, the other reads; nothing half-written is ever seen."""

import json
from dataclasses import FrozenInstanceError
from pathlib import Path

import numpy as np
import pytest

import tpbench
from tests.support.launcher_rows import FACTS, begun
from tpbench.launcher.attempt import abandon, store_left_results
from tpbench.launcher.failure import describe
from tpbench.settings import JobError
from tpbench.worker.task import RESERVED_FILE, RESULT_FILE, Result, Task


def test_a_task_is_read_as_it_was_written(tmp_path: Path) -> None:
    task = begun(tmp_path).task.with_columns(interleaved="S-0-1", interleaved_cells=3)
    task.save(tmp_path / "task.json")
    assert Task.load(tmp_path / "task.json") == task
    with pytest.raises(FrozenInstanceError):
        task.row_id = "another"  # type: ignore[misc]


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    attempt = begun(tmp_path)
    samples = np.array([1.0, 0.1 + 0.2])
    result = attempt.task.result("ok", "\udcff", samples_ms=samples, time_ms=np.float64(1.5))
    result.save(attempt.folder)
    loaded = Result.load(attempt.folder)
    assert loaded is not None
    assert loaded.columns["samples_ms"] == [1.0, 0.1 + 0.2] and loaded.columns["time_ms"] == 1.5
    assert loaded.columns["host"] == FACTS["host"]
    assert (loaded.row_id, loaded.reason, loaded.finished_at) == (result.row_id, "\udcff", result.finished_at)


def test_the_first_result_of_several_ranks_counts(tmp_path: Path) -> None:
    attempt = begun(tmp_path)
    attempt.task.result("oom", "rank 1").save(attempt.folder)
    attempt.task.result("error", "rank 0").save(attempt.folder)
    ended = attempt.close(*describe(1, 60.0, attempt.folder))
    assert ended.status == "oom" and str(ended.reason).startswith("rank 1")
    assert not attempt.has_result and attempt.has_row


def test_a_result_that_is_longer_than_its_reserved_space(tmp_path: Path) -> None:
    attempt = begun(tmp_path)
    attempt.task.result("ok", samples_ms=[1 / 3] * 100_000).save(attempt.folder)
    row = attempt.close().row
    assert row is not None and len(row["samples_ms"]) == 100_000


def test_the_reserved_space_is_returned(tmp_path: Path) -> None:
    attempt = begun(tmp_path)
    assert sum(file.stat().st_blocks for file in attempt.folder.iterdir()) * 512 >= 2**20
    attempt.close("skipped", "no GPU")
    assert [file.name for file in attempt.folder.iterdir()] == ["task.json"]


def test_a_result_that_cannot_be_read_is_an_error_row(tmp_path: Path) -> None:
    attempt = begun(tmp_path)
    (attempt.folder / RESULT_FILE).write_text(json.dumps({"row_id": 1}))
    ended = attempt.close(*describe(0, 60.0, attempt.folder))
    assert ended.status == "error" and "the result cannot be read" in str(ended.reason)


def test_results_that_a_killed_launcher_left_become_rows_once(tmp_path: Path) -> None:
    attempts = [begun(tmp_path, index) for index in range(4)]
    for attempt in attempts[:3]:
        attempt.task.result("ok", time_ms=1.0).save(attempt.folder)
    abandon(attempts[1].folder)
    keys = {attempts[0].cell.job.key, attempts[1].cell.job.key}
    for _ in range(2):
        store_left_results({str(tmp_path)}, keys)
    assert tpbench.load(tmp_path)["seed"].tolist() == [0]
    assert attempts[2].has_result  # a cell of another sweep


def test_the_space_that_a_killed_job_reserved_is_released(tmp_path: Path) -> None:
    killed, other = begun(tmp_path, 0), begun(tmp_path, 1)
    store_left_results({str(tmp_path)}, {killed.cell.job.key})
    assert not (killed.folder / RESERVED_FILE).exists() and (other.folder / RESERVED_FILE).exists()


def test_a_launcher_killed_between_row_and_result_leaves_one_row(tmp_path: Path) -> None:
    attempt = begun(tmp_path)
    attempt.task.result("ok", time_ms=1.0).save(attempt.folder)
    content = (attempt.folder / RESULT_FILE).read_bytes()
    attempt.close()
    (attempt.folder / RESULT_FILE).write_bytes(content)
    store_left_results({str(tmp_path)}, {attempt.cell.job.key})
    assert len(tpbench.load(tmp_path)) == 1 and not attempt.has_result


def test_a_full_disk_is_refused_before_the_ranks_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(JobError, match=r"no row can be written to .*: No space left on device"):
        begun(tmp_path)
