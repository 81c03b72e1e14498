"""A sweep and the rows of its cells, with a fake runner."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import tpbench as package
from tests.support.launcher_rows import FACTS, begun, cell
from tpbench.launcher.attempt import Attempt, discard_rows, store_left_results
from tpbench.launcher.display import Display
from tpbench.launcher.options import SweepOptions
from tpbench.launcher.planning.plan import Cell, ThisHost
from tpbench.launcher.runner import Runner, run_sweep
from tpbench.launcher.slurm import submitted
from tpbench.results.read import plain_rows
from tpbench.settings import JobError


class InstantRunner(Runner):
    """Ends each attempt at once as out of memory. The cells of `fail_once` end as error the first time."""

    target = ThisHost(gpus=8)
    facts = FACTS

    def __init__(self, fail_once: Sequence[int] = (), failure: str = "error") -> None:
        self.fail_once, self.failure = set(fail_once), failure
        self.started: list[int] = []

    def recover(self, cells: Sequence[Cell]) -> dict[int, str]:
        return {}

    def run(self, attempts: Sequence[Attempt], display: Display) -> Iterator[Attempt]:
        for planned in attempts:
            self.started.append(planned.cell.index)
            display.show(planned.cell)
            attempt = planned.begin()
            failing = planned.cell.index in self.fail_once
            self.fail_once.discard(planned.cell.index)
            attempt.task.save(attempt.task_file)
            yield attempt.close(self.failure if failing else "oom", "it broke" if failing else None)


def test_a_failure_goes_when_the_cell_has_another_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So does a later failure, and the sweeps of both are still collected."""
    cells = [cell(index, tmp_path, seed=index) for index in range(2)]
    logs = tmp_path / "sweeps"
    run_sweep(cells, logs / "first", SweepOptions(), InstantRunner(fail_once=[0]))
    failed, other = package.load(tmp_path).sort_values("cell").to_dict("records")
    assert (failed["status"], other["status"]) == ("error", "oom")
    file = tmp_path / "rows" / f"{failed['row_id']}.parquet"
    content = file.read_bytes()

    def rows_after_resuming(number: int, said: str) -> list[str]:
        run_sweep(cells, logs / str(number), SweepOptions(resume=True), InstantRunner())
        assert said in capsys.readouterr().out
        return list(package.load(tmp_path)["status"])

    def collected(name: str) -> str:
        assert submitted.main([str(logs / name)]) == 0
        return capsys.readouterr().out

    assert rows_after_resuming(1, "failed: error, it broke") == ["oom", "oom"]
    file.write_bytes(content)  # as a sweep leaves it that is killed with both rows on disk
    assert rows_after_resuming(2, "measured before") == ["oom", "oom"]
    assert ": oom" in (said := collected("first")) and "2 cells: 2 done, 0 of them failed" in said
    run_sweep(cells[:1], logs / "late", SweepOptions(), InstantRunner(fail_once=[0], failure="timeout"))
    assert sorted(package.load(tmp_path)["status"]) == ["oom", "oom", "timeout"]
    assert rows_after_resuming(3, "measured before") == ["oom", "oom"]
    assert ": oom" in collected("late")
    with pytest.raises(JobError) as refused:
        submitted.main([str(tmp_path)])
    assert {str(logs / "first"), str(logs / "1")} <= set(str(refused.value).splitlines())  # its sweeps


def test_a_cell_that_another_sweep_took_over_has_no_row_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = [cell(index, tmp_path, seed=index) for index in range(2)]
    monkeypatch.setattr(InstantRunner, "run", lambda self, attempts, _: iter([attempts[1].begin().close("oom")]))
    (attempt,) = run_sweep(cells, tmp_path / "sweeps/s", SweepOptions(), InstantRunner())
    assert attempt.cell.index == 1
    assert "another sweep with resume=true took over 1 of the cells" in capsys.readouterr().out


def test_a_result_that_cannot_become_a_row_is_named_and_kept(tmp_path: Path) -> None:
    attempt = begun(tmp_path)
    attempt.task.result("ok", time_ms=1.5).save(attempt.folder)
    (tmp_path / "rows").write_text("no folder")
    with pytest.raises(JobError, match=rf"; the row just measured is in {attempt.folder}/result\.json; make room"):
        attempt.close()
    (tmp_path / "rows").unlink()
    store_left_results({str(tmp_path)}, {attempt.cell.job.key})
    assert package.load(tmp_path)["time_ms"].tolist() == [1.5]


@pytest.mark.parametrize("moved", [False, True])
def test_a_result_saved_from_a_full_disk_becomes_a_row(moved: bool, tmp_path: Path) -> None:
    """The user frees space where the result is, or moves the output folder to another disk."""
    outputs = tmp_path / "outputs"
    one = cell(0, outputs)
    (outputs / "sweeps" / "s").mkdir(parents=True)
    attempt = Attempt.plan(one, outputs / "sweeps" / "s", FACTS).begin()
    attempt.task.save(attempt.task_file)
    attempt.task.result("ok", time_ms=1.5).save(attempt.folder)
    if moved:
        outputs = outputs.rename(tmp_path / "elsewhere")
    store_left_results({str(outputs)}, {one.job.key})
    assert package.load(outputs)["time_ms"].tolist() == [1.5]
    assert [each.name for each in tmp_path.iterdir()] == [outputs.name]
    assert not list(outputs.rglob("result.json"))


def test_a_row_cannot_have_a_file_made_outside_of_its_sweeps(tmp_path: Path) -> None:
    outputs, other = tmp_path / "outputs", tmp_path / "other"
    other.mkdir()
    runner = InstantRunner(fail_once=[0, 1])
    (outputs / "sweeps").mkdir(parents=True)
    run_sweep([cell(index, outputs, seed=index) for index in range(2)], outputs / "sweeps" / "s", SweepOptions(),
                    runner)  # fmt: skip
    honest, hostile = plain_rows(package.load(outputs))
    discard_rows(str(outputs), [honest, {**hostile, "log_dir": str(other)}])
    assert list(other.iterdir()) == []
    assert [each.parent.name for each in outputs.rglob("abandoned")] == [str(honest["cell"])]
    assert package.load(outputs).empty


@pytest.mark.parametrize("columns", [{"bytes_communicated": 768.5}, {"bytes_moved": 10**30}, {"no_such_column": 1}])
def test_a_result_that_fits_into_no_row_ends_only_its_cell(tmp_path: Path, columns: dict[str, Any]) -> None:
    attempt = Attempt.plan(cell(0, tmp_path), tmp_path / "sweeps" / "s", FACTS)
    attempt.folder.parent.mkdir(parents=True)
    attempt = attempt.begin()
    attempt.task.result("ok", None, **columns).save(attempt.folder)
    row = attempt.close().row
    assert row is not None and row["status"] == "error"
    assert row["reason"].startswith("the ok result does not fit into a row: ") and next(iter(columns)) in row["reason"]
