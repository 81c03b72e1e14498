"""Locks on GPUs of other processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import ROOT, environment
from tests.support.planned_jobs import job, pretend_four_gpus
from tpbench.launcher import devices


def test_gpus_of_another_process_are_free_when_it_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend_four_gpus(monkeypatch, tmp_path / "locks")
    probe = (
        "from pathlib import Path; from tpbench.launcher import devices;"
        f"devices.FOLDER = Path({str(devices.FOLDER)!r});"
        "files = [devices._lock(f'GPU-{each}') for each in (0, 2)];"
        "print(None not in files, flush=True); input()"
    )
    other = subprocess.Popen([sys.executable, "-c", probe], cwd=ROOT, env=environment(), text=True,
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    assert other.stdout is not None
    assert other.stdout.readline() == "True\n"
    assert devices.lease(job(tp_size=3)) is None
    pair = devices.lease(job(tp_size=2))
    assert pair is not None
    assert pair.beside_others
    assert pair.environment == {"CUDA_VISIBLE_DEVICES": "1,3"}
    pair.release()
    other.kill()
    other.wait()
    assert devices.lease(job(tp_size=4)) is not None
