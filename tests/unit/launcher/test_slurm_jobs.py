"""Attempts as Slurm jobs, and their collection. Needs no Slurm."""

import signal
from pathlib import Path

import pytest

from tests.support.launcher_rows import begun, cell
from tests.support.slurm_commands import SlurmCommands
from tpbench.launcher import interrupts
from tpbench.launcher.attempt import Attempt, abandon
from tpbench.launcher.display import Display
from tpbench.launcher.interrupts import Terminated
from tpbench.launcher.options import SlurmSettings, SweepOptions
from tpbench.launcher.slurm import submitted
from tpbench.launcher.slurm.jobs import Slurm
from tpbench.launcher.slurm.submitted import close_if_ended, is_wanted, left_behind, record
from tpbench.results.compact import compact
from tpbench.settings import JobError


@pytest.mark.parametrize(("state", "status"), [("TIMEOUT", "timeout"), ("OUT_OF_MEMORY", "error"), ("GONE", "error")])
def test_a_job_that_ended_without_a_row_gets_one(state: str, status: str, tmp_path: Path) -> None:
    attempt = begun(tmp_path)
    record(attempt, "7_0")
    assert close_if_ended(attempt, "RUNNING") is None
    done = close_if_ended(attempt, state)
    assert done is not None
    assert done.status == status
    ended = "is unknown to Slurm now" if state == "GONE" else f"ended as {state} before it wrote a row"
    assert (done.reason or "").startswith(f"Slurm job 7_0 {ended}")
    again = close_if_ended(attempt, "RUNNING")
    assert again is not None and again.row and done.row
    assert again.row["row_id"] == done.row["row_id"]


def test_a_cell_whose_submission_is_in_doubt_is_taken_over(tmp_path: Path) -> None:
    """The launcher died while it submitted the job. If Slurm has the job nevertheless, the job returns at once."""
    attempt = begun(tmp_path)
    (attempt.folder.parent / "slurm").mkdir()
    assert list(left_behind([str(tmp_path)], {attempt.cell.job.key})) == []
    assert attempt.abandoned
    record(attempt, "7_0")
    assert not is_wanted(attempt)


def test_an_abandoned_attempt_gets_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt = begun(tmp_path)
    record(attempt, "7_0")
    assert is_wanted(attempt)
    abandon(attempt.folder)
    assert close_if_ended(attempt, "CANCELLED") is None
    slurm = SlurmCommands(tmp_path, monkeypatch)
    assert submitted.main([str(attempt.folder.parent)]) == 3
    assert "no job runs it: run the sweep again with resume=true" in capsys.readouterr().out
    assert not attempt.has_row and slurm.asked == []


def test_the_job_of_an_abandoned_attempt_is_ended_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second scancel could end another job, because Slurm reuses numbers of jobs."""
    attempt = begun(tmp_path)
    (attempt.folder.parent / "slurm").mkdir()
    record(attempt, "7_0")
    abandon(attempt.folder)
    state = tmp_path / "state"
    slurm = SlurmCommands(tmp_path, monkeypatch, squeue=f'read state <{state}; echo "7_0|$state"',
                          scancel=f"echo CANCELLED >{state}")  # fmt: skip
    state.write_text("RUNNING\n")
    runner = Slurm(SlurmSettings(), SweepOptions())
    for _ in range(2):
        assert runner.recover([attempt.cell]) == {}
    assert [line.partition(" ")[0] for line in slurm.asked] == ["squeue", "scancel", "squeue"]
    assert not attempt.has_row


def test_an_interrupt_leaves_jobs_of_an_earlier_sweep_in_the_queue_and_ends_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job that Slurm doesn't cancel is named."""
    earlier = begun(tmp_path)
    (earlier.folder.parent / "slurm").mkdir()
    record(earlier, "7_0")
    slurm = SlurmCommands(tmp_path, monkeypatch, squeue="echo '7_0|RUNNING'", srun="", scancel="exit 1",
                          sbatch="echo Submitted batch job 8")  # fmt: skip
    new = Attempt.plan(cell(1, tmp_path, seed=1), tmp_path / "sweeps" / "new", {})
    runner = Slurm(SlurmSettings(), SweepOptions())
    assert runner.recover([earlier.cell, new.cell]) == {0: "already submitted as Slurm job 7_0"}
    with pytest.raises(Terminated), interrupts.noted():
        signal.raise_signal(signal.SIGTERM)
        list(runner.run([earlier, new], Display(2, tmp_path)))
    assert not earlier.abandoned and new.abandoned
    assert [line for line in slurm.asked if line.startswith("scancel")] == ["scancel 8"]
    (script,) = tmp_path.glob("sweeps/new/slurm/*_submission.sh")
    assert "#SBATCH --gpus-per-node=2\n" in script.read_text()
    said = capsys.readouterr().out
    assert "did not cancel this sweep's jobs: scancel 8" in said


def test_a_sweep_that_slurm_rejects_ends_with_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    SlurmCommands(tmp_path, monkeypatch, srun="", sbatch="echo sbatch: error: AssocMaxSubmitJobLimit >&2; exit 1")
    attempt = Attempt.plan(cell(0, tmp_path), tmp_path / "sweeps/S", {})
    with pytest.raises(JobError, match="none is in the queue: AssocMaxSubmitJobLimit"):
        list(Slurm(SlurmSettings(), SweepOptions()).run([attempt], Display(1, tmp_path)))
    assert not capsys.readouterr().err, "the message says it once"


def test_the_state_of_jobs_is_asked_where_slurm_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = begun(tmp_path)
    record(attempt, "7_0")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JobError, match="this needs Slurm's commands: there is no squeue here"):
        submitted.main([str(attempt.folder.parent)])


def test_a_sweep_of_one_host_is_looked_at_without_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the last attempt at each cell counts: here the one that was started again without other cells."""
    monkeypatch.setenv("PATH", str(tmp_path))
    crowded = begun(tmp_path)
    alone = crowded.again(not_interleaved="memory ran out").begin()
    alone.task.save(alone.task_file)
    alone.close("oom", "")
    sweep = crowded.folder.parent
    failed = Attempt.plan(cell(1, tmp_path), sweep, {}).begin()
    failed.task.save(failed.task_file)
    failed.close("timeout", "")
    assert submitted.main([str(sweep)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["0-again", "1", "2 cells"]
    assert "2 cells: 2 done, 1 of them failed, 0 not done yet" in lines[-1]


def test_options_for_one_host_are_refused() -> None:
    with pytest.raises(JobError, match=r"reuse=true .* needs hydra\.launcher\.cells_per_job=all"):
        Slurm(SlurmSettings(), SweepOptions(reuse=True))


def test_a_cell_whose_task_is_not_understood_is_passed_over(tmp_path: Path) -> None:
    """The file of the task was cut off, is foreign, or is of another version."""
    attempt = begun(tmp_path)
    sweep = attempt.folder.parent
    (sweep / "slurm").mkdir()
    text = attempt.task_file.read_text()
    changes = (text[:100], text.replace('"started_at"', '"began_at"'), text.replace('"triton_tp"', '"of_another_time"'))
    for changed in changes:
        attempt.task_file.write_text(changed)
        with pytest.raises(JobError, match="it has no cells that this version understands"):
            submitted.main([str(sweep)])


def test_a_sweep_is_collected_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    attempt = begun(Path("outputs"))
    attempt.close("skipped", "as it was measured")
    sweep = attempt.folder.parent.absolute()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert submitted.main([str(sweep)]) == 0
    assert "0: " in (said := capsys.readouterr().out) and "skipped as it was measured" in said
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("change", ["the folder is moved", "compact"])
def test_a_stored_row_is_found_wherever_it_is(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attempts = [begun(tmp_path / "here", index) for index in range(2)]
    for attempt in attempts:
        record(attempt, "7_0")
        attempt.close("skipped", "as it was measured")
    (tmp_path / "here/sweeps/S/slurm").mkdir()
    if change == "compact":
        compact(tmp_path / "here")
    (tmp_path / "here").rename(folder := tmp_path / ("here" if change == "compact" else "moved"))
    monkeypatch.setenv("PATH", "")  # nobody asks for the state of a job
    assert submitted.main([str(folder / "sweeps/S")]) == 0
    assert capsys.readouterr().out.count("skipped as it was measured") == 2
    assert list(left_behind([str(folder)], {attempt.cell.job.key for attempt in attempts})) == []
    assert list(tmp_path.iterdir()) == [folder]
