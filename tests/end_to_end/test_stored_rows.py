"""Rows stay whole while processes race, are killed, or find no room on the disk."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

import tpbench
from tests.support.command import ROOT, environment
from tests.support.launcher_rows import cell, measured
from tpbench.results.write import RowExists, write_row

COMPACT = [sys.executable, "-m", "tpbench", "compact"]


def race(output_dir: Path, number: int, barrier: Barrier, won: Synchronized[int]) -> None:
    for index in range(40):
        barrier.wait()
        try:
            write_row({"status": "ok", "cell": number}, output_dir, f"r{index}")
        except RowExists:
            continue
        with won.get_lock():
            won.value += 1


@pytest.mark.parametrize("hard_links", [True, False])
def test_racing_writers_publish_once(hard_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_link(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    if not hard_links:
        monkeypatch.setattr(os, "link", no_link)
    context = multiprocessing.get_context("fork")
    barrier, won = context.Barrier(2), context.Value("i", 0)
    racers = [context.Process(target=race, args=(tmp_path, number, barrier, won)) for number in range(2)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert [racer.exitcode for racer in racers] == [0, 0]
    assert won.value == 40
    assert len(list((tmp_path / "rows").glob("[!.]*"))) == 40
    assert not list(tmp_path.rglob("*.tmp"))


def test_compaction_beside_a_writer_and_killed_at_random_moments(tmp_path: Path) -> None:
    def seeds() -> list[int]:
        return sorted(tpbench.load(tmp_path)["seed"])

    chance = random.Random(1)
    for index in range(40):
        measured(cell(index, tmp_path, seed=index))
    writer = (
        "from pathlib import Path; from tests.support.launcher_rows import cell, measured;"
        f"folder = Path({str(tmp_path)!r});"
        "[measured(cell(i, folder, seed=100 + i)) for i in range(200)]"
    )
    writing = subprocess.Popen([sys.executable, "-c", writer], cwd=ROOT, env=environment())
    kills = 0
    while writing.poll() is None or kills < 6:
        merging = subprocess.Popen([*COMPACT, str(tmp_path)], stdout=subprocess.DEVNULL, env=environment())
        time.sleep(chance.uniform(0.3, 1.2))
        merging.send_signal(signal.SIGKILL)
        merging.wait()
        kills += 1
        found = seeds()
        assert len(found) == len(set(found))
        assert set(range(40)) <= set(found)
    assert writing.wait() == 0
    done = subprocess.run([*COMPACT, str(tmp_path)], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    assert "240 rows merged" in done.stdout
    assert seeds() == [*range(40), *range(100, 300)]
    left = list((tmp_path / "rows").glob("*.parquet"))
    assert len(left) == 1
