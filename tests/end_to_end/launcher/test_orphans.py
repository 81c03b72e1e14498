"""A resumed sweep ends the processes that dead launchers left in its folder, and no others."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tpbench as package
from tests.support.command import COMMAND, environment
from tests.support.fault_catalogue import SINGLE
from tests.support.held_ranks import Held
from tpbench.launcher import process
from tpbench.launcher.process import LAUNCHER, MARKER, OUTPUT_DIR, end_orphans

DEAD = "4194305:1"
"""A launcher with a number that Linux gives to no process."""

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a process that is marked as a job's."""
    started = []

    def marked(launcher: str, output_dir: Path = tmp_path) -> subprocess.Popen[bytes]:
        marks = {MARKER: "row", LAUNCHER: launcher, OUTPUT_DIR: str(output_dir)}
        line = [sys.executable, "-c", "print(flush=True); input()"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        started.append(subprocess.Popen(line, env={**os.environ, **marks}, **pipes))  # type: ignore[call-overload]
        started[-1].stdout.readline()
        return started[-1]

    yield marked
    for each in started:
        each.kill()
        each.communicate()


def test_only_what_a_dead_launcher_of_this_host_left_in_the_folder_is_ended(start: Start, tmp_path: Path) -> None:
    here = process._namespace()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    orphan = start(f"{DEAD}@{here}")
    others = [
        start(f"{process._identity(os.getpid())}@{here}"),
        start(f"{DEAD}@pid:[1]"),
        start(DEAD),  # left by a version that did not record where its launcher ran
        start(f"{DEAD}@{here}", tmp_path / "elsewhere"),
    ]
    end_orphans([str(tmp_path / "link")])
    orphan.wait(timeout=10)
    assert [each.poll() for each in others] == [None] * 4


def test_a_sweep_in_a_container_does_not_end_with_a_resumed_one_outside(tmp_path: Path) -> None:
    container = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if sys.platform != "linux" or subprocess.run([*container, "true"], capture_output=True).returncode:
        pytest.skip("a PID namespace of the test's own needs the right to make one")
    held = Held(tmp_path)
    line = [*container, *COMMAND, "-m", *SINGLE, "seed=1"]
    inside = subprocess.Popen(line, cwd=tmp_path, env={**environment(), **held.env}, stdout=subprocess.DEVNULL)
    held.wait()
    end_orphans([str(tmp_path / "outputs")])
    held.release()
    assert inside.wait(timeout=120) == 0
    assert list(package.load(tmp_path / "outputs")["status"]) == ["ok"]
