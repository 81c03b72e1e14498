"""Jobs that run side by side: locks on devices of other processes, and rows that name the neighbours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import tpbench as package
from tests.support.command import ROOT, environment, tpbench
from tests.support.planned_jobs import job, pretend_four_gpus
from tpbench.launcher import devices
from tpbench.launcher.devices import Devices


def test_devices_of_another_process_are_free_when_it_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
    host = Devices(split_cpu=False)
    assert host.lease(job(tp_size=3)) is None
    pair = host.lease(job(tp_size=2))
    assert pair is not None
    assert pair.beside_others
    assert pair.environment == {"CUDA_VISIBLE_DEVICES": "1,3"}
    host.release(pair)
    other.kill()
    other.wait()
    assert host.lease(job(tp_size=4)) is not None


ON_TWO_CORES = """
import os, pathlib
from tpbench.__main__ import main
from tpbench.launcher import devices
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
devices.FOLDER = pathlib.Path("locks").absolute()
main()
"""
"""Program that runs as on a machine with two cores and without other jobs."""


@pytest.mark.skipif(len(psutil.Process().cpu_affinity()) < 2, reason="needs two cores")
def test_rows_name_the_jobs_that_ran_beside_them(tmp_path: Path) -> None:
    done = tpbench("-m", "variant=pytorch_gather", "seed=1,2", "tp_size=1,2", "tokens=64", "vocab=1000",
                   "measure=quick", "min_iterations=3", "max_iterations=3", "device=cpu", "parallel=auto",
                   "reuse=true", cwd=tmp_path, program=("-c", ON_TWO_CORES))  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = package.load(tmp_path / "outputs")
    assert set(rows["status"]) == {"ok"}
    single = rows[rows["tp_size"] == 1]
    assert list(single["beside"]) == list(single["row_id"])[::-1]
    assert rows[rows["tp_size"] == 2]["beside"].isna().all()
