"""What can go wrong with a job, done to real ones: each costs its own row, says why, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import tpbench as package
from tests.command import Running, gone, tpbench

SLOW = ("variant=triton_tp", "tokens=2048", "vocab=16384", "tp_size=2", "measure=quick", "device=cpu")
"""Some ten seconds in the interpreter: long enough to be disturbed."""

TINY = ("shape=tiny_tp2", "measure=quick", "device=cpu")


def only_row(folder: Path) -> dict[str, object]:
    (row,) = package.load(folder / "outputs").to_dict("records")
    return row


def test_killed_rank(tmp_path: Path) -> None:
    running = Running(*SLOW, cwd=tmp_path)
    rank = running.wait_for("first pass", rank=1)
    family = running.family()
    rank.kill()
    code, output = running.end()
    row = only_row(tmp_path)
    assert (row["status"], code) == ("error", 1)
    assert "rank 1 ended with signal 9 (SIGKILL)" in str(row["reason"])
    assert "rank 1: first pass" in str(row["reason"])
    assert "Traceback" not in output
    assert gone(family)


def test_hung_rank(tmp_path: Path) -> None:
    running = Running(*SLOW, "timeout_s=30", cwd=tmp_path)
    running.wait_for("first pass", rank=0).send_signal(signal.SIGSTOP)
    family = running.family()
    code, _ = running.end()
    row = only_row(tmp_path)
    assert (row["status"], code) == ("timeout", 1)
    assert "still running after 30 s" in str(row["reason"])
    assert "rank 0: first pass" in str(row["reason"])
    assert row["time_ms"] != row["time_ms"]
    assert gone(family)


def test_out_of_memory_on_one_rank_only(tmp_path: Path) -> None:
    running = Running("variant=pytorch_gather", "tokens=4096", "vocab=32768", "tp_size=2", "device=cpu", cwd=tmp_path)
    rank = running.wait_for("setting up", rank=1)
    family = running.family()
    used = next(
        int(line.split()[1]) for line in Path(f"/proc/{rank.pid}/status").read_text().splitlines() if "VmData" in line
    )
    resource.prlimit(rank.pid, resource.RLIMIT_DATA, (used * 1024 + 2**28, used * 1024 + 2**28))
    code, _ = running.end()
    row = only_row(tmp_path)
    assert (row["status"], row["oom_rank"], code) == ("oom", 1, 0)
    assert row["oom_bytes"] > 2**20
    assert gone(family)


def test_memory_limit(tmp_path: Path) -> None:
    done = tpbench(
        "variant=pytorch_gather", "tokens=4096", "vocab=65536", "memory_limit_gib=0.5", "device=cpu", cwd=tmp_path
    )
    row = only_row(tmp_path)
    assert (row["status"], row["memory_limit_gib"], done.returncode) == ("oom", 0.5, 0)
    assert row["oom_bytes"] >= 2**27


def test_killed_launcher_takes_its_job_along(tmp_path: Path) -> None:
    running = Running(*SLOW, cwd=tmp_path)
    running.wait_for("first pass", rank=1)
    family = running.family()
    running.process.kill()
    assert len(family) >= 3
    assert gone(family, within_s=45)


def test_interrupt_keeps_rows_and_resume_completes(tmp_path: Path) -> None:
    sweep = ("-m", "variant=pytorch_tp_manual,triton_tp", *SLOW[1:])
    running = Running(*sweep, cwd=tmp_path)
    running.wait_for("first pass", rank=0, cell=1)
    family = running.family()
    os.kill(running.process.pid, signal.SIGINT)
    code, output = running.end()
    assert code == 130
    assert "1 of 2 cells have their rows" in output
    assert "python -m tpbench -m variant=pytorch_tp_manual,triton_tp" in output
    assert "Traceback" not in output
    assert gone(family)
    assert only_row(tmp_path)["variant"] == "pytorch_tp_manual"
    (tmp_path / "outputs/rows/broken.parquet").write_bytes(b"PAR1 not really")
    finished = tpbench(*sweep, "resume=true", cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert "measured before" in finished.stdout
    with pytest.warns(UserWarning, match=r"broken\.parquet"):
        rows = package.load(tmp_path / "outputs")
    assert list(rows["variant"]) == ["pytorch_tp_manual", "triton_tp"]
    assert set(rows["status"]) == {"ok"}


def test_two_sweeps_at_once(tmp_path: Path) -> None:
    both = [Running("-m", "variant=pytorch_tp_manual", f"seed={seed}", *TINY, cwd=tmp_path) for seed in (1, 2)]
    ends = [each.end() for each in both]
    assert [code for code, _ in ends] == [0, 0], ends
    rows = package.load(tmp_path / "outputs")
    assert sorted(json.loads(job)["seed"] for job in rows["job"]) == [1, 2]
    assert set(rows["status"]) == {"ok"}
    assert rows["sweep_id"].nunique() == 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True)
    if made.returncode:
        pytest.skip("a small disk needs the right to mount one")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_full_disk_loses_no_measurement(tmp_path: Path, small_disk: Path) -> None:
    (small_disk / "outputs").mkdir()
    (tmp_path / "outputs").symlink_to(small_disk / "outputs")
    running = Running("-m", "variant=triton_tp,pytorch_tp_manual", *SLOW[1:], cwd=tmp_path)
    running.wait_for("first pass", rank=0)
    with (small_disk / "filler").open("wb", buffering=0) as filler:
        while True:
            try:
                filler.write(b"\0" * 4096)
            except OSError:
                break
    code, output = running.end()
    assert code != 0
    assert "takes no more rows; the row just measured is in " in output
    rescued = Path(output.split("the row just measured is in ")[1].split()[0])
    row = package.load(rescued).to_dict("records")[0]
    rescued.unlink()
    assert (row["status"], row["variant"]) == ("ok", "triton_tp")


def test_outputs_that_cannot_be_written_are_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "outputs").write_text("a file, not a folder")
    done = tpbench(*TINY, cwd=tmp_path)
    assert done.returncode == 1
    assert "Not a directory: 'outputs/" in done.stderr
    assert "Traceback" not in done.stderr
