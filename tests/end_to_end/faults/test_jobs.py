"""Faults of real jobs: each costs only its own row, which says why, and leaves no process behind."""

import contextlib
import math
import os
import re
import resource
import signal
import time
from pathlib import Path

import psutil
import pytest

import tpbench as package
from tests.support.command import ROOT, Running, gone, tpbench
from tests.support.disturbed_sweeps import ENDLESS, SINGLE, WITHOUT_END
from tests.support.held_ranks import Held
from tests.support.launcher_rows import begun
from tpbench.launcher.devices import Lease
from tpbench.launcher.torchrun import Rendezvous, Torchrun


def only_row(folder: Path) -> dict[str, object]:
    (row,) = package.load(folder / "outputs").to_dict("records")
    return row


JUMP = """
import os, signal, time
monotonic, jump_s = time.monotonic, 0
def jump(*_):
    global jump_s
    jump_s = {limit}
if "RANK" not in os.environ:
    time.monotonic = lambda: monotonic() + jump_s
    signal.signal(signal.SIGUSR2, jump)
"""
"""At SIGUSR2 the launcher's clock jumps to the job's time limit."""
TIME_LIMIT_S = 9000
SKIPS = """
from average import average, dist

@average.variant("rank 1 skips the collective of the step")
def skips(problem, inputs, rank):
    def sum_over_ranks():
        if rank.rank == 0:
            open("waits", "w").close()
            dist.all_reduce(inputs["x"].clone(), group=rank.tp_group)
    def step():
        sum_over_ranks()
        return {"mean": inputs["x"].clone()}
    return step
"""


def test_ranks_that_hang_say_where(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(JUMP.replace("{limit}", str(TIME_LIMIT_S)))
    page = (ROOT / "tpbench/docs/own_operation.md").read_text()
    (tmp_path / "average.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    (tmp_path / "skipping.py").write_text(SKIPS)
    env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    skips = ("variant=../skipping.py:skips", "tokens=8", "hidden=4", "tp_size=2", "device=cpu", "reuse=true")
    stopped, skipping = tmp_path / "stopped", tmp_path / "skipping"
    sweeps = []
    for folder, line in ((stopped, ENDLESS), (skipping, skips)):
        folder.mkdir()
        sweeps.append(Running(*line, f"timeout_s={TIME_LIMIT_S}", cwd=folder, env=env))
    ranks = [running.wait_for("first pass", rank=0) for running in sweeps]
    families = [running.family() for running in sweeps]
    ranks[0].send_signal(signal.SIGSTOP)
    sweeps[0].until(lambda: ranks[0].status() == psutil.STATUS_STOPPED, "the stopped rank")
    sweeps[1].until((skipping / "waits").exists, "the rank that waits")
    for folder, running, family in zip((stopped, skipping), sweeps, families, strict=True):
        running.process.send_signal(signal.SIGUSR2)
        code, output = running.end()
        row = only_row(folder)
        assert (row["status"], code) == ("timeout", 1), output
        assert f"still running after timeout_s={TIME_LIMIT_S}" in str(row["reason"])
        assert row["time_ms"] != row["time_ms"]
        assert gone(family)
    assert re.search(r"rank 0: \w+", str(only_row(stopped)["reason"]))
    reason = str(only_row(skipping)["reason"])
    waits = r"now in skipping\.py:9 \(sum_over_ranks\), called in skipping\.py:11 \(step\)"
    assert re.search(rf"rank 0: .*{waits}\nrank 1: .*now in tpbench/measure/ranks\.py:\d+ \(", reason, re.S), reason


def test_out_of_memory_on_one_rank_only(tmp_path: Path) -> None:
    sizes = ("tokens=4096", "vocab=32768", "tp_size=2", *WITHOUT_END)
    running = Running("variant=pytorch_gather", *sizes, "device=cpu", cwd=tmp_path)
    rank = running.wait_for("setting up", rank=1)
    family = running.family()
    least = math.inf
    with contextlib.suppress(psutil.NoSuchProcess, OSError, StopIteration):
        while rank.status() != psutil.STATUS_ZOMBIE:  # the present size may be the peak: the least one counts
            status = Path(f"/proc/{rank.pid}/status").read_text().splitlines()
            least = min(least, next(int(line.split()[1]) * 1024 for line in status if "VmData" in line))
            resource.prlimit(rank.pid, resource.RLIMIT_DATA, (int(least) + 2**28, int(least) + 2**28))
            time.sleep(0.02)
    code, _ = running.end()
    row = only_row(tmp_path)
    assert (row["status"], row["oom_rank"], code) == ("oom", 1, 0)
    assert row["oom_bytes"] > 2**20
    assert gone(family)


def test_memory_limit_of_one_job_without_a_sweep(tmp_path: Path) -> None:
    sizes = ("tokens=4096", "vocab=65536", "tp_size=1", "memory_limit_gib=0.25")
    done = tpbench("variant=pytorch_gather", *sizes, "device=cpu", "output_dir=elsewhere", cwd=tmp_path)
    (row,) = package.load(tmp_path / "elsewhere").to_dict("records")
    assert not (tmp_path / "outputs").exists()
    assert (row["status"], row["memory_limit_gib"], done.returncode) == ("oom", 0.25, 0)
    assert row["oom_bytes"] >= 2**27


def test_a_node_does_not_wait_for_one_that_has_ended_the_attempt(tmp_path: Path) -> None:
    """Otherwise the late node's next attempts would begin too late for the other node, and end as timeouts."""
    attempt = begun(tmp_path)
    rendezvous = Rendezvous(2, "127.0.0.1:9", "127.0.0.1", node=1)  # where no other node listens
    late = Torchrun([attempt], Lease(), rendezvous=rendezvous)
    try:
        assert late.poll() == []
        attempt.close("error", "rank 0 broke")
        assert [ended.reason for ended in late.poll()] == ["rank 0 broke"]
    finally:
        late.end()
    assert late.over and not psutil.pid_exists(late.tree.agent.pid)


def test_interrupt_keeps_rows_and_resume_completes(tmp_path: Path) -> None:
    sweep = ("-m", "variant=pytorch_tp_manual,pytorch_gather", *SINGLE[1:])
    running = Running(*sweep, cwd=tmp_path, env=Held(tmp_path, "first pass", task="/1/task.json").env)
    running.wait_for("first pass", rank=0, cell=1)
    family = running.family()
    os.kill(running.process.pid, signal.SIGINT)
    code, output = running.end()
    assert code == 130
    assert "1 of 2 cells have their rows" in output
    assert "python -m tpbench -m variant=pytorch_tp_manual,pytorch_gather" in output
    assert "Traceback" not in output
    assert gone(family)
    assert only_row(tmp_path)["variant"] == "pytorch_tp_manual"
    (tmp_path / "outputs/rows/broken.parquet").write_bytes(b"PAR1 not really")
    finished = tpbench(*sweep, "resume=true", cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert "measured before" in finished.stdout
    with pytest.warns(UserWarning, match=r"broken\.parquet"):
        rows = package.load(tmp_path / "outputs")
    assert list(rows["variant"]) == ["pytorch_tp_manual", "pytorch_gather"]
    assert set(rows["status"]) == {"ok"}
