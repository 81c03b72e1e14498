"""A Slurm to test against: the one that SLURM_CONF names, else one of the tests' own."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

CLUSTER = Path(__file__).with_name("cluster.sh")


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Slurm's commands reach a cluster of two nodes."""
    if "SLURM_CONF" in os.environ:
        yield
        return
    missing = [each for each in ("slurmctld", "slurmd", "munged", "sbatch") if shutil.which(each) is None]
    if missing:
        pytest.skip(f"Slurm is not installed, there is no {missing[0]}: tests/slurm/cluster.sh install")
    if os.getuid():
        pytest.skip("a Slurm of the tests' own needs root")
    folder = tmp_path_factory.mktemp("slurm")
    started = subprocess.run([CLUSTER, "start", folder], capture_output=True, text=True)
    assert started.returncode == 0, started.stderr
    os.environ["SLURM_CONF"] = started.stdout.split()[-1]
    yield
    del os.environ["SLURM_CONF"]
    subprocess.run([CLUSTER, "stop", folder], check=True)
