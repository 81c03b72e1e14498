"""Rows stay whole while processes race, are killed, or find no room on the disk."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

import tpbench
from tests.support.command import ROOT, environment
from tests.support.launcher_rows import cell, measured
from tpbench.results.write import RowExists, write_row

COMPACT = [sys.executable, str(ROOT / "scripts/compact.py")]


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


FILL = """
    import errno, os, resource, sys
    from tpbench.results.write import write_row
    folder, limit = sys.argv[1], int(sys.argv[2])
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    error = None
    for index in range(1000):
        try:
            write_row({"reason": "x" * 20000}, folder, f"r{index}")
        except OSError as caught:
            error = caught
            break
    print(errno.errorcode[error.errno], index, sorted(os.listdir(f"{folder}/rows")) if index else [])
"""


def fill(folder: Path, limit: int = 0, mount: str = "") -> subprocess.CompletedProcess[str]:
    """Write rows in another process until no more fit. With `mount`, mount a small file system at `folder` before."""
    command = [sys.executable, "-c", textwrap.dedent(FILL), str(folder), str(limit)]
    if mount:
        script = f'mount -t tmpfs -o {mount} none "$0" && exec "$@"'
        command = ["unshare", "-rm", "sh", "-c", script, str(folder), *command]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def in_mount(folder: Path, mount: str) -> subprocess.CompletedProcess[str]:
    try:
        able = subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", folder], capture_output=True)
    except FileNotFoundError:
        able = None
    if able is None or able.returncode:
        pytest.skip("this machine does not let us mount a tmpfs")
    return fill(folder, mount=mount)


def test_a_full_disk(tmp_path: Path) -> None:
    done = in_mount(tmp_path, "size=256k")
    name, count, left = done.stdout.split(maxsplit=2)
    assert name == "ENOSPC", done.stderr
    assert 0 < int(count) < 12
    assert left.strip() == str(sorted(f"r{index}.parquet" for index in range(int(count))))


def test_a_read_only_disk(tmp_path: Path) -> None:
    done = in_mount(tmp_path, "ro")
    assert done.stdout.split(maxsplit=2)[:2] == ["EROFS", "0"], done.stderr


def test_a_limit_on_file_size(tmp_path: Path) -> None:
    done = fill(tmp_path, limit=4096)
    assert done.stdout.split(maxsplit=2)[:2] == ["EFBIG", "0"], done.stderr
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


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
