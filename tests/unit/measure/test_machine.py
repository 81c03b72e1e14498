"""Facts about a machine that a row records, and others that it must not record."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest

import tpbench
from tpbench.measure import machine
from tpbench.results.schema import COMMON_COLUMNS


def test_facts_are_columns() -> None:
    found = machine.facts()
    assert set(found) <= set(COMMON_COLUMNS)
    assert found["host"]
    assert found["torch_version"].startswith("2.")
    assert found["memory_gib"] == psutil.virtual_memory().total / 2**30
    assert found["os"] == f"{platform.system()} {platform.release()}" and found["cpu_count"] == len(
        os.sched_getaffinity(0)
    )


@pytest.mark.parametrize(
    ("own", "said"), [("2.11.0+cu130", "2.11.0+cu130"), ("2.11.0", "2.11.0"), ("3.0", "2.11.0"), (None, "2.11.0")]
)
def test_a_build_s_local_part_that_the_metadata_leave_out(
    own: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "made_up-2.11.0.dist-info").mkdir()
    (tmp_path / "made_up-2.11.0.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: made_up\nVersion: 2.11.0\n"
    )
    if own:
        (tmp_path / "made_up").mkdir()
        (tmp_path / "made_up/version.py").write_text(
            f"__all__ = ['__version__']\n__version__ = '{own}'\ndebug = False\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    assert machine.version("made_up") == said
    assert machine.version("not_there_at_all") is None


def test_only_listed_variables_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    recorded = json.loads(machine.recorded_environment())
    assert recorded["NCCL_ALGO"] == "Ring" and not {"PATH", "AWS_SECRET_ACCESS_KEY"} & set(recorded)


@pytest.mark.parametrize(
    ("names", "visible", "count", "facts"),
    [
        (None, None, 0, {"gpu_count": 0}),
        ([], None, 0, {"gpu_count": 0}),
        (["B", "A", "B"], None, 3, {"gpu_count": 3, "gpu_name": "A + B", "driver_version": "580.1"}),
        (["A", "A"], "1", 1, {"gpu_count": 2, "gpu_name": "A", "driver_version": "580.1"}),
    ],
)
def test_gpus_are_those_of_nvml(
    names: list[str] | None, visible: str | None, count: int, facts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvml(monkeypatch, names)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.gpu_count() == count
    assert facts.items() <= machine.facts().items()


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [("2,0", "20"), ("GPU-x", ""), ("0,-1,2", "0"), ("MIG-x", ["MIG-x"]), ("GPU-1", "1"), ("0,1, ,2", "01"), ("", "")],
)
def test_only_admitted_gpus_are_used(visible: str, uuids: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch, ["A"] * 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    named = [uuid if len(uuid) > 1 else f"GPU-{uuid}" for uuid in uuids]
    assert [uuid for uuid, _ in machine.visible_gpus()] == named


def fake_nvml(monkeypatch: pytest.MonkeyPatch, names: list[str] | None) -> None:
    """Replace NVML by that of a host with these GPUs. None: NVML does not start."""
    nvml = mock.Mock(NVMLError=RuntimeError)
    nvml.nvmlInit.side_effect = RuntimeError if names is None else None
    nvml.nvmlDeviceGetCount.return_value = len(names or ())
    nvml.nvmlDeviceGetHandleByIndex.side_effect = lambda index: index
    nvml.nvmlDeviceGetUUID.side_effect = lambda index: f"GPU-{index}"
    nvml.nvmlDeviceGetName.side_effect = lambda index: (names or [])[index]
    nvml.nvmlSystemGetDriverVersion.return_value = "580.1"
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(("text", "threads"), [("", None), (" 4 ", 4), ("4,2", 4), ("0", None), ("abc", None)])
def test_threads_of_openmp(text: str, threads: int | None) -> None:
    assert machine.omp_threads({"OMP_NUM_THREADS": text}) == threads


def test_free_memory_is_within_the_limit_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * 2**30, total=2**40))
    monkeypatch.setattr(machine, "Path", lambda path: tmp_path / path.rpartition("/")[2])
    assert machine.available_memory_gib() == 8.0  # there are no such files
    (tmp_path / "memory.current").write_text(f"{2**30}\n")
    for limit, free in (("max", 8.0), (str(4 * 2**30), 3.0), (str(20 * 2**30), 8.0)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert machine.available_memory_gib() == free


def test_a_checkout_with_changes_is_dirty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpbench, "__file__", str(tmp_path / "tpbench/__init__.py"))
    assert machine._git() == {}
    (tmp_path / ".git").mkdir()
    assert machine._git() == {}  # no repository
    (tmp_path / ".git").rmdir()
    for line in ("git init -q", "git -c user.name=a -c user.email=a@b commit -q --allow-empty -m a"):
        subprocess.run(line.split(), cwd=tmp_path, check=True)
    found = machine._git()
    assert len(found["git_commit"]) == 40 and found["git_dirty"] is False
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))  # as in a hook of another repository
    (tmp_path / "new").touch()
    assert machine._git() == {**found, "git_dirty": True}
    assert machine.user_commit(tmp_path) is None  # the checkout of tpbench itself
    monkeypatch.setattr(tpbench, "__file__", "/elsewhere/tpbench/__init__.py")
    machine.user_commit.cache_clear()
    assert machine.user_commit(tmp_path) == found["git_commit"]  # a new file may be a row
