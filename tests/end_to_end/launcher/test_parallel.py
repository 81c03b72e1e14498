"""Jobs side by side: which devices they get, who else may have them, and what their rows say."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import tpbench as package
from tests.support.command import ROOT, environment, tpbench
from tpbench.job import Job, parse_job
from tpbench.launcher import devices, gpus
from tpbench.launcher.devices import Device, Devices, choose
from tpbench.launcher.gpus import Gpu
from tpbench.settings import JobError


def job(ranks: int, device: str = "cuda") -> Job:
    return parse_job({"variant": "triton_tp", "tokens": 64, "vocab": 1000, "tp_size": ranks, "device": device})


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A host of four, where 0 and 2 are linked, and 1 and 3."""
    monkeypatch.setattr(devices, "FOLDER", tmp_path / "locks")
    monkeypatch.setattr(gpus, "usable", lambda: [Gpu(f"GPU-{each}", str(each)) for each in range(4)])
    pairs = {frozenset(("GPU-0", "GPU-2")): 400.0, frozenset(("GPU-1", "GPU-3")): 400.0}
    monkeypatch.setattr(gpus, "links", lambda uuids: pairs)


@pytest.mark.usefixtures("four_gpus")
def test_two_pairs_and_then_no_more() -> None:
    host = Devices(split_cpu=True)
    leases = [host.lease(job(2)), host.lease(job(2))]
    assert [each and each.environment["CUDA_VISIBLE_DEVICES"] for each in leases] == ["0,2", "1,3"]
    assert host.lease(job(1)) is None
    assert leases[0] is not None
    host.give_back(leases[0])
    assert host.lease(job(4)) is None
    single = host.lease(job(1))
    assert single is not None
    assert single.environment == {"CUDA_VISIBLE_DEVICES": "0"}
    assert not single.beside_others


@pytest.mark.usefixtures("four_gpus")
def test_a_single_one_leaves_a_linked_pair() -> None:
    host = Devices(split_cpu=True)
    shares = [host.lease(job(1)), host.lease(job(2)), host.lease(job(1))]
    assert [each and each.environment["CUDA_VISIBLE_DEVICES"] for each in shares] == ["0", "1,3", "2"]


@pytest.mark.usefixtures("four_gpus")
def test_other_peoples_devices_are_respected_until_they_die() -> None:
    probe = (
        "from pathlib import Path; from tpbench.launcher import devices;"
        f"devices.FOLDER = Path({str(devices.FOLDER)!r});"
        "locks = [devices._lock(devices.Device(f'GPU-{each}', str(each))) for each in (0, 2)];"
        "print(None not in locks, flush=True); input()"
    )
    other = subprocess.Popen([sys.executable, "-c", probe], cwd=ROOT, env=environment(), text=True,
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    assert other.stdout is not None
    assert other.stdout.readline() == "True\n"
    host = Devices(split_cpu=False)
    assert host.lease(job(3)) is None
    pair = host.lease(job(2))
    assert pair is not None
    assert pair.beside_others
    assert pair.environment == {"CUDA_VISIBLE_DEVICES": "1,3"}
    host.give_back(pair)
    other.kill()
    other.wait()
    assert host.lease(job(4)) is not None


def test_no_folder_for_locks_is_said_and_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(devices, "FOLDER", tmp_path / "file")
    monkeypatch.setattr(gpus, "usable", lambda: [Gpu("GPU-0", "0")])
    with pytest.raises(JobError, match=r"file/GPU-0\.lock cannot be opened .*all users"):
        Devices(split_cpu=False).lease(job(1))


def test_a_lock_does_not_follow_the_user_s_own_folder_for_temporary_files(tmp_path: Path) -> None:
    said = subprocess.run(
        [sys.executable, "-c", "from tpbench.launcher import devices; print(devices.FOLDER)"],
        cwd=ROOT, env={**environment(), "TMPDIR": str(tmp_path)}, text=True, capture_output=True, check=True,
    )  # fmt: skip
    assert said.stdout.strip() == str(devices.FOLDER)


def test_of_equals_the_first_are_chosen() -> None:
    free = [Device(str(each), str(each)) for each in range(4)]
    assert [each.name for each in choose(free, 2, {})] == ["0", "1"]
    full = {frozenset(pair): 1.0 for pair in itertools.combinations("0123", 2)}
    assert [each.name for each in choose(free, 2, full)] == ["0", "1"]


def test_of_a_hundred_cores_the_first_are_chosen_at_once() -> None:
    """They have no links. To compare all sets of them would take years."""
    free = [Device(f"core-{each}", str(each)) for each in range(128)]
    assert choose(free, 64, {}) == tuple(free[:64])


def test_among_many_gpus_the_linked_ones_are_found_without_comparing_all_sets() -> None:
    """Four islands of eight; the first has only seven left."""
    free = [Device(str(each), str(each)) for each in range(1, 32)]
    links = {
        frozenset((str(a), str(b))): 400.0 if a // 8 == b // 8 else 1.0 for a, b in itertools.combinations(range(32), 2)
    }
    assert [int(each.name) for each in choose(free, 8, links)] == list(range(8, 16))
    assert [int(each.name) for each in choose(free, 7, links)] == list(range(1, 8))


def test_a_job_on_a_whole_cpu_needs_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "usable", list)
    host = Devices(split_cpu=False)
    first, second = host.lease(job(2, "cpu")), host.lease(job(2, "cpu"))
    assert first == second == devices.Lease()


@pytest.mark.parametrize(
    ("visible", "names"),
    [(None, ["a1", "b2", "c3"]), ("2,0", ["c3", "a1"]), ("GPU-x", ["GPU-x"]), ("b", ["b2"]), ("", [])],
)
def test_only_admitted_gpus_are_used(visible: str | None, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Nvml:
        """As much of NVML as is asked."""

        nvmlInit = nvmlShutdown = staticmethod(lambda: None)
        nvmlDeviceGetCount = staticmethod(lambda: 3)
        nvmlDeviceGetHandleByIndex = staticmethod(lambda index: index)
        nvmlDeviceGetUUID = staticmethod(lambda handle: ["a1", "b2", "c3"][handle])
        NVMLError = OSError

    monkeypatch.setitem(sys.modules, "pynvml", Nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [each.uuid for each in gpus.usable()] == names


ON_TWO_CORES = """
import os, pathlib
from tpbench.__main__ import main
from tpbench.launcher import devices
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
devices.FOLDER = pathlib.Path("locks").absolute()
main()
"""
"""As on a machine that has two, and nobody else's jobs."""


@pytest.mark.skipif(len(psutil.Process().cpu_affinity()) < 2, reason="needs two cores")
def test_rows_say_who_ran_beside_them(tmp_path: Path) -> None:
    done = tpbench("-m", "variant=pytorch_gather", "seed=1,2", "tp_size=1,2", "tokens=64", "vocab=1000",
                   "measure=quick", "device=cpu", "parallel=auto", "reuse=true", cwd=tmp_path,
                   program=("-c", ON_TWO_CORES))  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = package.load(tmp_path / "outputs")
    assert set(rows["status"]) == {"ok"}
    single = rows[rows["tp_size"] == 1]
    assert list(single["beside"]) == list(single["row_id"])[::-1]
    assert rows[rows["tp_size"] == 2]["beside"].isna().all()
