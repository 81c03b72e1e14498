"""Leases of devices."""

from pathlib import Path

import pytest

from tests.support.planned_jobs import job, pretend_four_gpus
from tpbench.launcher import devices
from tpbench.launcher.devices import Lease, lease
from tpbench.settings import JobError


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend_four_gpus(monkeypatch, tmp_path / "locks")


@pytest.mark.usefixtures("four_gpus")
def test_two_pairs_are_all() -> None:
    first, second = lease(job(tp_size=2)), lease(job(tp_size=2))
    assert first and first.environment == {"CUDA_VISIBLE_DEVICES": "0,1"} and not first.beside_others
    assert second and second.environment == {"CUDA_VISIBLE_DEVICES": "2,3"} and second.beside_others
    assert lease(job(tp_size=1)) is None
    first.release()
    assert lease(job(tp_size=4)) is None
    single = lease(job(tp_size=1))
    assert single and single.environment == {"CUDA_VISIBLE_DEVICES": "0"}


def test_a_missing_folder_for_locks_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(devices, "FOLDER", tmp_path / "file")
    monkeypatch.setattr(devices, "visible_gpus", lambda: [("GPU-0", "0")])
    with pytest.raises(JobError, match=r"file/GPU-0\.lock cannot be locked .*all users"):
        lease(job(tp_size=1))


@pytest.mark.usefixtures("four_gpus")
def test_a_job_on_a_cpu_needs_no_lease() -> None:
    assert lease(job(tp_size=2, device="cpu")) == lease(job(tp_size=2, device="cpu")) == Lease()
