"""Facts about a machine that a row records, and others that it must not record."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import psutil
import pytest

import tpbench
from tpbench.measure import machine
from tpbench.results.schema import common_columns


def test_facts_are_columns() -> None:
    found = machine.facts()
    assert set(found) <= set(common_columns())
    assert found["host"]
    assert found["torch_version"].startswith("2.")
    assert 0 < found["memory_gib"] <= psutil.virtual_memory().total / 2**30


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


def test_torch_is_called_what_it_calls_itself() -> None:
    """A resumed sweep compares what the launcher finds with what ranks wrote."""
    import torch

    assert machine.version("torch") == torch.__version__


def test_every_triton_kernel_changes_the_kernels_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "tpbench"
    shutil.copytree(Path(tpbench.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__", "rows"))
    monkeypatch.setattr(tpbench, "__file__", str(copy / "__init__.py"))
    kernels = [each for each in copy.rglob("*.py") if "@triton.jit" in each.read_text()]
    assert {"kernels", "embedding_grad"} <= {each.parent.name for each in kernels}
    seen = {machine.kernels_version.__wrapped__()}
    for file in kernels:
        file.write_text(file.read_text() + "# changed\n")
        seen.add(machine.kernels_version.__wrapped__())
    assert len(seen) == 1 + len(kernels)
    (copy / "workloads/embedding_grad/crossover_study.py").write_text("")
    assert machine.kernels_version.__wrapped__() in seen


def test_only_listed_variables_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    recorded = json.loads(machine.recorded_environment())
    assert recorded["NCCL_ALGO"] == "Ring"
    assert set(recorded) <= set(machine.RECORDED_VARIABLES)
    assert "hunter2" not in json.dumps(recorded)


def test_visible_devices_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    present = machine.gpu_count()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine.gpu_count() == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert machine.gpu_count() == min(1, present)
