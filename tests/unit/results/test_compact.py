"""Merging row files: nothing is lost, nothing is seen twice, even if processes read, write or die meanwhile."""

from pathlib import Path

import pytest

import tpbench
from tests.support.launcher_rows import cell, measured
from tpbench.console import information
from tpbench.results.compact import compact


def fill(folder: Path, rows: int, status: str = "ok", seed: int = 0) -> None:
    for index in range(rows):
        measured(cell(index, folder, seed=seed + index), status)


def seeds(folder: Path) -> list[int]:
    return sorted(tpbench.load(folder)["seed"])


def test_the_same_rows_from_fewer_files(tmp_path: Path) -> None:
    fill(tmp_path, 20)
    before = tpbench.load(tmp_path)
    assert compact(tmp_path)[0] == "20 rows merged; 20 files before, 1 now"
    assert tpbench.load(tmp_path).equals(before)
    fill(tmp_path, 5, seed=20)
    assert compact(tmp_path)[0].endswith(", 1 now")
    assert seeds(tmp_path) == list(range(25))
    assert "1 files before" in compact(tmp_path)[0]


def test_what_may_be_taken_back_or_is_not_ours_stays(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    fill(tmp_path, 2, "error", seed=10)
    (tmp_path / "rows" / "broken.parquet").write_bytes(b"PAR1 not really")
    done, complaints = compact(tmp_path)
    assert done.startswith("3 rows")
    assert len(list((tmp_path / "rows").glob("*.parquet"))) == 4
    assert any("broken.parquet" in each for each in complaints)
    with pytest.warns(UserWarning, match=r"broken\.parquet"):
        assert len(tpbench.load(tmp_path)) == 5


def test_a_renamed_file_and_files_of_other_folders_stay(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    first, *_ = sorted((tmp_path / "rows").glob("*.parquet"))
    first.rename(first.with_name("kept.parquet"))
    (tmp_path / "rows/inner").mkdir()
    second = sorted((tmp_path / "rows").glob("2*.parquet"))[0]
    (tmp_path / "rows/inner" / second.name).write_bytes(second.read_bytes())
    assert compact(tmp_path)[0] == "3 rows merged; 3 files before, 2 now"
    assert (tmp_path / "rows/kept.parquet").exists() and (tmp_path / "rows/inner" / second.name).exists()


def test_rows_are_copied_and_deleted_also_from_a_merged_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, both = tmp_path / "first", tmp_path / "both"
    fill(first, 4)
    compact(first)
    fill(first, 2, seed=10)
    (first / "reference").mkdir()
    assert information(["rows", str(first), "--only", "seed=1,10", "--into", str(both)]) == 0
    fill(both, 1, seed=20)
    assert seeds(both) == [1, 10, 20] and seeds(first) == [0, 1, 2, 3, 10, 11]
    one = ["rows", str(first), "--only", "seed=1,10", "--delete"]
    assert information(one) == 2 and "add --yes" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    for answer, code, left in (("", 1, [0, 1, 2, 3, 10, 11]), ("y", 0, [0, 2, 3, 11])):
        monkeypatch.setattr("builtins.input", lambda question, answer=answer: answer)
        assert information(one) == code and seeds(first) == left
    assert "deleted 2 rows of " in capsys.readouterr().out
    assert information([*one[:2], "--delete", "--yes"]) == 0 and not list((first / "rows").iterdir())


def test_a_folder_without_rows_is_a_wrong_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert information(["compact", str(tmp_path)]) == 2
    assert f"no such folder or file: {tmp_path}/rows: name the output_dir" in capsys.readouterr().err
