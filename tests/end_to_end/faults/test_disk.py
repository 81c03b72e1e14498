"""Outputs that take no more: no measurement is lost, and where nothing could be stored nothing is run."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import tpbench as package
from tests.support.command import Running, tpbench
from tests.support.disturbed_sweeps import SINGLE
from tests.support.held_ranks import Held


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 4 MB for one test."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("a disk of the test's own needs the right to mount one")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_full_disk_loses_no_measurement(tmp_path: Path, disk: Path) -> None:
    (disk / "outputs").mkdir()
    (tmp_path / "outputs").symlink_to(disk / "outputs")
    sweep = ("-m", *SINGLE, "variant=pytorch_tp_manual,pytorch_gather")
    held = Held(tmp_path, "first pass")
    running = Running(*sweep, cwd=tmp_path, env=held.env)
    running.wait_for("first pass", rank=0)
    with (disk / "filler").open("wb", buffering=0) as filler:
        while True:
            try:
                filler.write(b"\0" * 4096)
            except OSError:
                break
    held.release()
    code, output = running.end()
    assert code != 0
    assert "no row can be written to outputs: No space left on device" in output  # of the second cell
    row = package.load(tmp_path / "outputs").to_dict("records")[0]
    assert (row["status"], row["variant"]) == ("ok", "pytorch_tp_manual")
    (disk / "filler").unlink()
    done = tpbench(*sweep, "resume=true", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("done pytorch_tp_manual")]
    assert line.endswith("measured before")
    assert list(package.load(tmp_path / "outputs")["status"]) == ["ok"] * 2
    assert not list((tmp_path / "outputs/sweeps").rglob("result.json"))


def test_outputs_that_cannot_be_written_are_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "outputs").write_text("a file, not a folder")
    done = tpbench(*SINGLE, cwd=tmp_path)
    assert done.returncode == 2
    assert "output_dir=outputs cannot be written: Not a directory" in done.stderr
    assert "Traceback" not in done.stderr
