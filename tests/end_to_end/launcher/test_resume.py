"""What a resumed sweep runs again, and that every cell ends with one row whatever is killed and when."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tpbench as package
from tests.support.command import ROOT, Running, environment, gone, tpbench
from tests.support.held import Held, wait_for_claims
from tests.support.launcher_rows import FACTS, cell, measured
from tpbench.launcher.attempt import discard
from tpbench.launcher.locks import Claims
from tpbench.launcher.resume import verdicts
from tpbench.launcher.slurm import collect
from tpbench.results.cells import newest

CELLS = ("-m", "variant=pytorch_tp_manual", "seed=1,2,3,4", "tokens=16", "vocab=64", "tp_size=1", "measure=quick",
         "min_iterations=3", "max_iterations=3", "device=cpu")  # fmt: skip


@pytest.mark.parametrize(
    ("status", "changed", "why", "runs"),
    [
        ("ok", {}, "measured before", False),
        ("oom", {}, "measured before", False),
        ("wrong", {}, "measured before", False),
        ("error", {}, "failed: error, it broke", True),
        ("timeout", {}, "failed: timeout, it broke", True),
        ("skipped", {}, "skipped before: it broke", True),
        ("ok", {"torch_version": "2.11.0"}, "stale: torch was 2.11.0, is 2.13.0", True),
        ("ok", {"triton_version": None}, "stale: triton was none, is 3.9.0", True),
        ("ok", {"kernels_version": "xyz"}, "stale: tpbench's kernels was xyz, is abc", True),
        ("ok", {"driver_version": "550.2"}, "stale: driver was 550.2, is 600.1", True),
        (
            "ok",
            {"gpu_name": "old", "driver_version": "1"},
            "stale: GPU was old, is a GPU, driver was 1, is 600.1",
            True,
        ),
        ("ok", {"host": "elsewhere", "cpu_model": "another"}, "measured before", False),
    ],
)
def test_why_a_cell_runs_or_not(status: str, changed: dict[str, Any], why: str, runs: bool, tmp_path: Path) -> None:
    one = cell(0, tmp_path)
    measured(one, status, None if status == "ok" else "it broke\nin two lines", **changed)
    verdict = verdicts([one], FACTS)[0]
    assert (verdict.why, verdict.row is None) == (why, runs)


def test_a_changed_job_is_another_cell(tmp_path: Path) -> None:
    measured(cell(0, tmp_path))
    found = verdicts([cell(0, tmp_path), cell(1, tmp_path, seed=5), cell(2, tmp_path, timeout_s=5)], FACTS)
    assert [each.why for each in found.values()] == ["measured before", "missing: has no row yet", "measured before"]


def test_a_cell_that_still_cannot_run_stays_skipped(tmp_path: Path) -> None:
    one = cell(0, tmp_path, obstacle="needs 8 GPUs, found 4")
    measured(one, "skipped", "needs 8 GPUs, found 4")
    assert verdicts([one], FACTS)[0].row is not None


def test_an_old_row_of_the_same_machine_stands_beside_a_newer_one_of_another(tmp_path: Path) -> None:
    one = cell(0, tmp_path)
    measured(one)
    measured(one, gpu_name="another GPU")
    measured(one, "error", "it broke")
    assert verdicts([one], FACTS)[0].why == "measured before"


def test_what_is_not_known_here_is_taken_as_unchanged(tmp_path: Path) -> None:
    one = cell(0, tmp_path)
    measured(one)
    software = {name: FACTS[name] for name in ("torch_version", "triton_version", "kernels_version")}
    assert verdicts([one], software)[0].why == "measured before"


def test_failures_that_a_row_replaces_are_those_before_it_made_as_it_was(tmp_path: Path) -> None:
    one = cell(0, tmp_path)
    measured(one, "error", "of another machine", gpu_name="another GPU")
    measured(one, "error", "of another torch", torch_version="2.11.0")
    measured(one, "error", "before")
    measured(one, "timeout", "its job never began", gpu_name=None, driver_version=None)
    measured(cell(1, tmp_path, seed=5), "error", "another cell")
    measured(one, "skipped", "too few GPUs then")
    alike = ["before", "its job never began", "too few GPUs then"]
    verdict = verdicts([one], FACTS)[0]
    assert [row["reason"] for row in verdict.failures] == alike
    assert verdict.row is None
    measured(one)
    measured(one, "timeout", "after")
    measured(one, "error", "with other kernels", kernels_version="xyz")
    verdict = verdicts([one], FACTS)[0]
    assert (verdict.why, verdict.row is None) == ("measured before", False)
    assert [row["reason"] for row in verdict.failures] == [*alike, "after"]


def test_a_report_shows_what_a_resumed_sweep_takes_for_done(tmp_path: Path) -> None:
    one = cell(0, tmp_path)

    def shown() -> list[str]:
        return [str(each) for each in newest(package.load(tmp_path))["status"]]

    measured(one)
    measured(one, "timeout", "with timeout_s=2")
    measured(one, "skipped", "too few GPUs")
    assert (verdicts([one], FACTS)[0].why, shown()) == ("measured before", ["ok"])
    now = {**FACTS, "kernels_version": "xyz"}
    measured(one, "error", "it broke", **now)
    assert (verdicts([one], now)[0].why, shown()) == ("failed: error, it broke", ["error"])
    measured(one, **now)
    assert (verdicts([one], now)[0].why, shown()) == ("measured before", ["ok"])


def test_a_later_failure_goes_and_its_sweep_is_collected_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = (*CELLS[:2], "seed=1", *CELLS[3:])
    assert tpbench(*sweep, cwd=tmp_path).returncode == 0
    assert Running(*sweep, "timeout_s=1", cwd=tmp_path, env=Held(tmp_path).env).end()[0] == 1
    ok, timeout = package.load(tmp_path / "outputs").to_dict("records")
    assert (ok["status"], timeout["status"]) == ("ok", "timeout")
    resumed = tpbench(*sweep, "resume=true", cwd=tmp_path)
    assert "measured before" in resumed.stdout and resumed.returncode == 0
    assert list(package.load(tmp_path / "outputs")["status"]) == ["ok"]
    assert collect.main([str(tmp_path / "outputs/sweeps" / timeout["sweep_id"])]) == 0
    assert f"ok (sweep {ok['sweep_id']})" in capsys.readouterr().out


def test_a_failed_row_that_cannot_be_given_up_stays(tmp_path: Path) -> None:
    """Somebody would write it again."""
    one = cell(0, tmp_path)
    logs = tmp_path / "logs"
    logs.write_text("no folder")
    measured(one, "error", "it broke", log_dir=str(logs))
    (row,) = verdicts([one], FACTS)[0].failures
    with pytest.raises(NotADirectoryError):
        discard(str(tmp_path), row)
    assert len(package.load(tmp_path)) == 1
    logs.unlink()
    discard(str(tmp_path), row)
    discard(str(tmp_path), row)
    assert len(package.load(tmp_path)) == 0


def test_a_failure_goes_when_the_cell_has_another_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    file.write_bytes(content)
    (sweep_of_row,) = package.load(tmp_path / "outputs", status="ok", seed=1)["sweep_id"]
    assert collect.main([str(tmp_path / "outputs/sweeps" / sweep_of_row)]) == 0
    assert not file.exists()
    capsys.readouterr()
    assert collect.main([str(tmp_path / "outputs/sweeps" / failed["sweep_id"])]) == 0
    said = capsys.readouterr().out
    assert f"ok (sweep {sweep_of_row})" in said and "2 cells: 2 done, 0 of them failed" in said


def test_claims_keep_others_out_and_die_with_their_owner(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    one, two = cell(0, tmp_path), cell(1, tmp_path, seed=1)
    ours = Claims([str(tmp_path)])
    assert ours.take(one)
    probe = (
        "from pathlib import Path; from tests.support.launcher_rows import cell;"
        "from tpbench.launcher.locks import Claims;"
        f"folder = Path({str(tmp_path)!r}); claims = Claims([str(folder)]);"
        "print(claims.take(cell(0, folder)), claims.take(cell(1, folder, seed=1)), flush=True); input()"
    )
    other = subprocess.Popen([sys.executable, "-c", probe], cwd=ROOT, env=environment(), text=True,
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    assert other.stdout is not None
    assert other.stdout.readline().split() == ["False", "True"]
    assert not ours.take(two)
    other.kill()
    other.wait()
    assert ours.take(two)
    ours.close()


def test_a_failed_cell_is_tried_again_and_has_one_row(tmp_path: Path) -> None:
    held = Held(tmp_path)
    running = Running(*CELLS[:2], "seed=1", *CELLS[3:], "retries=2", cwd=tmp_path, env=held.env)
    for tries in ("0", "0.2"):
        running.wait_for("importing torch", rank=0, cell=tries).kill()
    held.release()
    code, output = running.end()
    (row,) = package.load(tmp_path / "outputs").to_dict("records")
    assert (row["status"], row["tries"], code) == ("ok", 3, 0)
    assert output.count("again pytorch_tp_manual") == 2
    assert "SIGKILL" in output


def test_two_sweeps_that_resume_in_one_folder_share_the_cells(tmp_path: Path) -> None:
    both = [Running(*CELLS[:2], "seed=1,2", *CELLS[3:], "resume=true", cwd=tmp_path) for _ in range(2)]
    ends = [each.end() for each in both]
    assert [code for code, _ in ends] == [0, 0], ends
    assert sorted(package.load(tmp_path / "outputs")["seed"]) == [1, 2]


def test_when_the_sweep_that_had_the_cells_dies_the_other_runs_them(tmp_path: Path) -> None:
    first = Running(*CELLS[:2], "seed=1,2", *CELLS[3:], "resume=true", cwd=tmp_path, env=Held(tmp_path).env)
    family = first.wait_for("importing torch", rank=0) and first.family()
    second = Running(*CELLS[:2], "seed=1,2", *CELLS[3:], "resume=true", cwd=tmp_path)
    wait_for_claims(second)
    first.process.kill()
    first.end()
    code, output = second.end()
    assert code == 0, output
    assert sorted(package.load(tmp_path / "outputs")["seed"]) == [1, 2]
    assert gone(family)
