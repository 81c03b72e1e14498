"""Sweeps as jobs of a real Slurm: what ends well, what is cancelled, what takes too long, what is requeued."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import tpbench as package
from tests.support.command import ROOT, Found, Running, environment, tpbench, until
from tests.support.disturbed_sweeps import WITHOUT_END
from tests.support.held_ranks import Held
from tpbench.results.current_rows import newest
from tpbench.worker.start import MARKER

pytestmark = pytest.mark.usefixtures("slurm")

SLURM = ("-m", "hydra/launcher=torchrun_slurm", "hydra.launcher.poll_s=0.5")
TINY = ("variant=pytorch_gather", "shape=tiny_tp2", "measure=quick", "min_iterations=3", "max_iterations=3",
        "device=cpu")  # fmt: skip
SINGLE = (*TINY, "tp_size=1")
"""A job of one rank."""
ENDLESS = (*SINGLE, *WITHOUT_END)
ENDLESS_AND_BRIEF = (*SINGLE, *WITHOUT_END[:-1], "max_iterations=1000000,3")
"""Two jobs, of which the first does not end by itself."""


def logged_until(folder: Path, found: Callable[[], Found | None], what: str) -> Found:
    """Wait as `until` does. A failure shows Slurm's queue and the last lines of each log of the sweeps in a folder."""

    def evidence() -> str:
        line = ["squeue", "--states=all", "--format=%i %T %r %M of %l, begins %S"]
        queue = subprocess.run(line, capture_output=True, text=True).stdout
        logs = [each for each in sorted(folder.rglob("*")) if each.suffix in (".out", ".err", ".log")]
        ends = [f"{each}:\n" + "\n".join(each.read_text(errors="replace").splitlines()[-15:]) for each in logs]
        return "\n".join(["", queue, *ends])

    return until(found, what, evidence)


def job_of(folder: Path, cell: int = 0) -> str:
    """Return Slurm's number of the cell's job."""
    files = f"outputs/sweeps/*/{cell}/slurm_job"
    return logged_until(folder, lambda: next(iter(folder.glob(files)), None), "the submission").read_text()


def ranks_of(folder: Path, cell: int = 0, phase: str = "first pass") -> list[psutil.Process]:
    """Wait until a cell's ranks are in that phase, and return their processes."""

    def workers() -> list[psutil.Process]:
        logs = folder.glob(f"outputs/sweeps/*/{cell}/node0*/*/attempt_0/0/stderr.log")
        if not any(phase in each.read_text() for each in logs):
            return []
        return [each for each in psutil.process_iter() if _is_rank(each, folder, cell)]

    return logged_until(folder, workers, f"cell {cell} to be {phase}")


def _is_rank(process: psutil.Process, folder: Path, cell: int) -> bool:
    try:
        line, environ = process.cmdline(), process.environ()
        return "tpbench.worker.rank" in line and "RANK" in environ and MARKER in environ and (
            f"/{cell}/node" in line[-1] and str(folder) in line[-1]
        )  # fmt: skip
    except psutil.Error:
        return False


def collect(sweep: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "tpbench", "collect", str(sweep)]
    return subprocess.run(line, capture_output=True, text=True, env=environment(), cwd=cwd)


def collected(sweep: Path, cwd: Path, meanwhile: Callable[[], object] = lambda: None) -> tuple[int, str]:
    """Wait until Slurm has ended all jobs of a sweep. Collect it, and return the exit code and the output.

    `meanwhile` is called again and again while a job waits or runs.
    """
    jobs = {each.read_text() for each in sweep.glob("*/slurm_job")}

    def ended() -> bool:
        if {"PENDING", "RUNNING", "COMPLETING"} & {state for job in jobs for state in state_of(job).split()}:
            meanwhile()
            return False
        return True

    def has_all_rows() -> subprocess.CompletedProcess[str] | None:  # a node may write its row a moment later
        done = collect(sweep, cwd)
        return None if done.returncode == 3 else done

    logged_until(cwd, ended, "the end of all jobs")
    done = logged_until(cwd, has_all_rows, "all rows")
    return done.returncode, done.stdout + done.stderr


def rows(folder: Path) -> list[dict[str, Any]]:
    return package.load(folder / "outputs").sort_values("cell").to_dict("records")  # type: ignore[return-value]


def control(*arguments: str) -> None:
    subprocess.run(["scontrol", *arguments], check=True, capture_output=True)


HELD = "importing torch"
"""The phase in which the tests hold a rank."""


def under(held: Held, *more: str) -> str:
    """Return the option that holds a sweep's ranks in a phase. `more`: further shell lines to run before it."""
    return f"hydra.launcher.setup={json.dumps([f'export PYTHONPATH={held.path}:$PYTHONPATH', *more])}"


SCONTROL = """#!/bin/sh
{scontrol} "$@"
sleep 600
"""
"""A slow `scontrol`. Slurm ends the job that asks for a requeue, and this `scontrol`, before the answer comes."""


def state_of(job_id: str) -> str:
    line = ["squeue", "--noheader", "--array", "--states=all", "--format=%T", f"--jobs={job_id}"]
    return subprocess.run(line, capture_output=True, text=True).stdout.strip()


def run_again_now(job_id: str, folder: Path) -> None:
    """Ask Slurm again and again to start a requeued job, which Slurm holds for two minutes after it has cleaned up.

    Do not ask in the second in which the last run ended: the node would end the new run together with the last.
    """
    logged_until(folder, lambda: state_of(job_id) == "PENDING", "the job to be pending again")

    def started() -> bool:
        hurry(job_id)
        return state_of(job_id) in ("RUNNING", "COMPLETED")  # COMPLETING is still the last run

    logged_until(folder, started, "the job to start again")


def hurry(job_id: str) -> None:
    """Let a job start that Slurm holds."""
    time.sleep(1.5)
    subprocess.run(["scontrol", "update", f"jobid={job_id}", "StartTime=now"], capture_output=True)


@pytest.fixture(scope="module", autouse=True)
def overdue(tmp_path_factory: pytest.TempPathFactory, slurm: None) -> Path:
    """Start a job that exceeds its limit, and one that doesn't. Slurm notices late, so other tests run meanwhile."""
    folder = tmp_path_factory.mktemp("overdue")
    # Slurm tells a job of its end half a minute early. The other half was too short for the brief cell on a slow host.
    limits = ("hydra.launcher.time_limit_min=2", "hydra.launcher.signal_delay_s=5", "hydra.launcher.requeues=0")
    done = tpbench(*SLURM, *limits, *ENDLESS_AND_BRIEF, "wait=false", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "cells left to Slurm: 2" in done.stdout
    for rank in ranks_of(folder):
        rank.send_signal(signal.SIGSTOP)
    return folder


@pytest.fixture(scope="module", autouse=True)
def overdue_once(tmp_path_factory: pytest.TempPathFactory, slurm: None) -> Path:
    """Start a job that exceeds its limit and may be requeued once. Other tests run meanwhile."""
    folder = tmp_path_factory.mktemp("overdue_once")
    # Slurm tells it of its end half a minute earlier than asked: of two minutes the second run has enough.
    limits = ("hydra.launcher.time_limit_min=2", "hydra.launcher.signal_delay_s=5", "hydra.launcher.requeues=1")
    held = Held(folder)
    slow = folder / "slow" / "scontrol"
    slow.parent.mkdir()
    slow.write_text(SCONTROL.format(scontrol=shutil.which("scontrol")))
    slow.chmod(0o755)
    setup = under(held, f"export PATH={slow.parent}:$PATH")
    done = tpbench(*SLURM, *limits, *SINGLE, setup, "wait=false", cwd=folder)
    assert done.returncode == 0, done.stderr
    for rank in ranks_of(folder, phase=HELD):
        rank.send_signal(signal.SIGSTOP)
    held.release()
    return folder


def test_an_array_ends_in_the_same_table(tmp_path: Path) -> None:
    """A variant in a user's file runs on the nodes as one of this package does. Variables of the shell change nothing,
    and true and false are flags of sbatch."""
    shutil.copy(ROOT / "tpbench/api/examples/entropy_loss.py", tmp_path / "my_loss.py")  # as `tpbench new` does
    shell = {"SQUEUE_PARTITION": "other", "SBATCH_WAIT": "1", "SBATCH_HOLD": "1", "SACCT_FEDERATION": "1"}
    flags = "+hydra.launcher.sbatch={exclusive: true, overcommit: false}"
    sweep = (*SLURM, *SINGLE, "variant=my_loss.py:fast_tp,pytorch_gather")
    code, output = Running(*sweep, flags, cwd=tmp_path, env=shell).end()
    assert code == 0, output
    found = rows(tmp_path)
    assert [(row["variant"], row["status"]) for row in found] == [
        ("my_loss.py:fast_tp", "ok"), ("pytorch_gather", "ok"),
    ]  # fmt: skip
    assert {row["nodes"] for row in found} == {1}
    assert {row["host"] for row in found} <= {"left", "right"}
    assert "2 rows in outputs/rows" in output
    (submission,) = tmp_path.glob("outputs/sweeps/*/slurm/*_submission.sh")
    assert "#SBATCH --array=0-1%2" in submission.read_text()
    assert "#SBATCH --exclusive\n" in submission.read_text()
    assert "overcommit" not in submission.read_text()


def test_steps_of_a_job_are_printed_where_the_sweep_was_started(tmp_path: Path) -> None:
    line = ("variant=fsdp", "shape=tiny_train_dp2", "dp_size=1", "steps=2", "warmup_steps=2", "log_interval=2")
    code, output = Running(*SLURM, *line, "device=cpu", cwd=tmp_path).end()
    assert code == 0 and re.search(r"job \d+: step 2/4: loss .*\njob \d+: step 4/4: loss", output), output


def test_two_nodes_and_a_list_of_cells_that_a_requeued_job_continues(tmp_path: Path) -> None:
    """On one node, cells of a problem take turns in one torchrun. A job of two nodes has a torchrun for each cell."""
    line = (*SLURM, *TINY, "hydra.launcher.gpus_per_node=2", "dp_size=1,2")
    line = (*line, "variant=pytorch_gather,pytorch_tp_manual", "reuse=true", "order=interleaved")
    line = (*line, "hydra.launcher.cells_per_job=all")
    planned = tpbench(*line, "dry_run=true", cwd=tmp_path).stdout
    assert "cpu, 4 ranks on 2 nodes" in planned
    held = Held(tmp_path, task="/3/node0/task.json")
    running = Running(*line, under(held), cwd=tmp_path)
    ranks_of(tmp_path, cell=3, phase=HELD)
    job_id = job_of(tmp_path, 3)
    control("requeue", job_id)
    held.release()
    run_again_now(job_id, tmp_path)
    code, output = running.end()
    assert code == 0, output
    found = rows(tmp_path)
    assert [(row["status"], row["nodes"], row["world_size"]) for row in found] == [("ok", 1, 2), ("ok", 2, 4)] * 2
    assert len(list(tmp_path.glob("outputs/sweeps/*/slurm/*_submitted.pkl"))) == 2  # jobs, one for each layout
    gather, _, manual, last = found
    assert gather["interleaved"] == manual["interleaved"] and manual["interleaved_cells"] == 2
    assert last["not_interleaved"] == "its job has several nodes"
    assert "--nnodes=2 --nproc-per-node=2" in last["command"]
    assert "NCCL_SOCKET_IFNAME" not in last["environment"]
    assert '"GLOO_SOCKET_IFNAME": "lo"' in last["environment"]  # the interface of both nodes' address
    nodes = [sorted(each.name for each in tmp_path.glob(f"outputs/sweeps/*/{cell}/node*")) for cell in (1, 3)]
    assert nodes == [["node0", "node1"], ["node0", "node0.1", "node1", "node1.1"]]


def test_on_two_nodes_a_killed_rank_is_named_by_its_own_node(tmp_path: Path) -> None:
    """Rank 1 is the only one of the second node, where its local number is 0."""
    running = Running(*SLURM, *ENDLESS, "dp_size=2", "hydra.launcher.gpus_per_node=1", cwd=tmp_path)
    ranks = {each.environ()["RANK"]: each for each in ranks_of(tmp_path)}
    until(lambda: len(ranks) == 2 or ranks.update({e.environ()["RANK"]: e for e in ranks_of(tmp_path)}), "two ranks")
    ranks["1"].kill()
    code, output = running.end()
    (row,) = rows(tmp_path)
    assert (row["status"], code) == ("error", 1), output
    assert "rank 1 ended with signal 9 (SIGKILL)" in row["reason"]
    assert row["nodes"] == 2


def test_a_resumed_sweep_waits_for_jobs_of_a_killed_launcher_and_one_that_is_cancelled_costs_its_own_row(
    tmp_path: Path,
) -> None:
    held = Held(tmp_path)
    sweep = (*SLURM, *SINGLE, "tokens=16,2", under(held))
    running = Running(*sweep, cwd=tmp_path)
    ranks_of(tmp_path, phase=HELD)
    running.process.kill()
    running.end()
    resumed = Running(*sweep, "resume=true", cwd=tmp_path)
    lines = iter(resumed.process.stdout or [])
    assert any(f"already submitted as Slurm job {job_of(tmp_path)}" in line for line in lines)
    subprocess.run(["scancel", job_of(tmp_path)], check=True)
    held.release()
    code, output = resumed.end()
    assert code == 1, output
    cancelled, other = rows(tmp_path)
    assert (cancelled["status"], other["status"]) == ("error", "ok")
    assert "ended as CANCELLED before it wrote a row" in cancelled["reason"]
    assert re.search(r"the last lines:\nnode0, local rank 0: \[.* s\] rank 0: \w", cancelled["reason"])
    (first,) = tmp_path.glob("outputs/sweeps/*")
    done = tpbench(*sweep, "resume=true", "wait=false", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(row["status"] for row in rows(tmp_path)) == ["error", "ok"]  # nothing in its place yet
    (second,) = set(tmp_path.glob("outputs/sweeps/*")) - {first}
    assert collected(second, tmp_path)[0] == 0
    assert list(newest(package.load(tmp_path / "outputs"))["status"]) == ["ok", "ok"]  # as reports choose rows
    assert collect(first, tmp_path).returncode == 1  # the cancelled job's row stays until resume=true


def test_a_preempted_job_is_requeued_and_has_one_row(tmp_path: Path) -> None:
    held = Held(tmp_path)
    running = Running(*SLURM, *SINGLE, under(held), cwd=tmp_path)
    ranks_of(tmp_path, phase=HELD)
    job_id = job_of(tmp_path)
    subprocess.run(["scancel", "--signal=USR2", job_id], check=True)
    logged_until(tmp_path, lambda: state_of(job_id) == "PENDING", "the job to be requeued")
    held.release()
    run_again_now(job_id, tmp_path)
    code, output = running.end()
    assert code == 0, output
    (row,) = rows(tmp_path)
    assert row["status"] == "ok"
    assert {each.name for each in tmp_path.glob("outputs/sweeps/*/0/node*")} == {"node0", "node0.1"}
    (log,) = tmp_path.glob("outputs/sweeps/*/slurm/*_0_log.out")

    def ended(times: int) -> bool:
        return log.read_text().count("Job completed successfully") == times

    logged_until(tmp_path, lambda: ended(1), "the end of the job, a moment after its row")
    control("requeue", job_id)  # its row is on disk: it returns at once
    run_again_now(job_id, tmp_path)
    logged_until(tmp_path, lambda: ended(2), "the second end")
    assert {each.name for each in tmp_path.glob("outputs/sweeps/*/0/node*")} == {"node0", "node0.1"}
    assert len(rows(tmp_path)) == 1


def test_interrupted_the_sweep_takes_its_jobs_along_and_resumed_runs_them(tmp_path: Path) -> None:
    """SIGTERM unwinds the stack as SIGINT does (`tests/unit/launcher/test_sweep.py`)."""
    held = Held(tmp_path)
    sweep = (*SLURM, *SINGLE, under(held))
    running = Running(*sweep, cwd=tmp_path)
    ranks = ranks_of(tmp_path, phase=HELD)
    for rank in ranks:
        rank.send_signal(signal.SIGSTOP)  # so that Slurm needs its time to end the job
    held.release()
    os.kill(running.process.pid, signal.SIGINT)
    code, output = running.end()
    assert code == 130
    assert "0 of 1 cells have their rows" in output
    (cut_off,) = tmp_path.glob("outputs/sweeps/*")
    done = tpbench(*sweep, "resume=true", cwd=tmp_path)  # at once: the job may not have ended
    assert done.returncode == 0, done.stdout + done.stderr
    assert not any(each.is_running() for each in ranks)
    collected = collect(cut_off, tmp_path)
    assert "1 done, 0 of them failed" in collected.stdout  # the job that was cut off gets no row
    assert [row["status"] for row in rows(tmp_path)] == ["ok"]


def test_a_cell_whose_setup_fails_says_why(tmp_path: Path) -> None:
    setup = ["true", "module() { echo no such module >&2; false; }; module load cuda"]
    done = tpbench(*SLURM, *SINGLE, f"hydra.launcher.setup={json.dumps(setup)}", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    (row,) = rows(tmp_path)
    assert row["status"] == "error" and "no such module" in row["reason"]
    assert "this line of hydra.launcher.setup failed: module() " in row["reason"]
    (sweep,) = tmp_path.glob("outputs/sweeps/*")
    said = collect(sweep, tmp_path).stdout.splitlines()
    assert said[0].endswith("ended as FAILED before it wrote a row") and said[1].startswith("1 cell: 1 done, 1 of")


def test_over_the_time_limit_a_job_is_run_again_as_often_as_was_asked_for(overdue_once: Path) -> None:
    (log,) = overdue_once.glob("outputs/sweeps/*/slurm/*_0_log.out")
    job_id = log.name.removesuffix("_0_log.out")
    logged_until(overdue_once, lambda: "this job is timed-out" in log.read_text(), "Slurm to tell the job of its end")
    (sweep,) = overdue_once.glob("outputs/sweeps/*")
    code, output = collected(sweep, overdue_once, lambda: hurry(job_id))
    assert code == 0, output
    assert [row["status"] for row in rows(overdue_once)] == ["ok"]
    assert {each.name for each in overdue_once.glob("outputs/sweeps/*/0/node*")} == {"node0", "node0.1"}


def test_over_the_time_limit_is_a_timeout_and_the_others_have_their_rows(overdue: Path) -> None:
    (sweep,) = overdue.glob("outputs/sweeps/*")
    code, output = collected(sweep, overdue)
    assert code == 1 and "2 cells: 2 done, 1 of them failed, 0 not done yet" in output, output
    assert [row["status"] for row in rows(overdue)] == ["timeout", "ok"]
    assert "Slurm's time limit" in rows(overdue)[0]["reason"] or "TIMEOUT" in rows(overdue)[0]["reason"]
