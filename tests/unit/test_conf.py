"""The files in conf/ and the registry tell the same story."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tpbench.job import field_names
from tpbench.workloads import variants, workloads

CONF = Path(__file__).resolve().parents[2] / "conf"


def values(file: Path) -> dict[str, object]:
    return {
        name: value for name, value in yaml.safe_load(file.read_text()).items() if name not in ("defaults", "hydra")
    }


def test_every_variant_has_its_file_and_every_file_its_variant() -> None:
    files = {file.stem: values(file) for file in (CONF / "variant").glob("*.yaml")}
    assert set(files) == set(variants())
    assert all(content["variant"] == name for name, content in files.items())


@pytest.mark.parametrize("file", sorted(CONF.rglob("*.yaml")), ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_files_set_only_fields_that_exist(file: Path) -> None:
    if file.parent.name == "launcher":
        return
    assert set(values(file)) - {"shape_workload"} <= field_names()


@pytest.mark.parametrize(
    "name", ["v32k_tp2", "v32k_tp4", "v65k_tp4", "v131k_tp4", "v131k_tp8", "v32k_tp1", "v65k_tp1", "v131k_tp1"]
)
def test_shape_names_say_what_they_hold(name: str) -> None:
    shape = values(CONF / "shape" / f"{name}.yaml")
    vocab, tp_size = name.removeprefix("v").split("k_tp")
    assert shape["tokens"] == 4096
    assert (int(str(shape["vocab"])) // 1000, shape["tp_size"]) == (int(vocab), int(tp_size))


def test_workloads_know_themselves() -> None:
    for name, workload in workloads().items():
        assert workload.name == name
        assert set(workload.headline) <= set(workload.problem.__dataclass_fields__)
        assert {option.name for option in workload.options} <= set(workload.problem.__dataclass_fields__)
        for variant in workload.variants.values():
            assert variant.takes <= {option.name for option in workload.options}


def test_planning_a_sweep_does_not_import_torch() -> None:
    probe = (
        "import sys, tpbench.launcher.plugin, tpbench.results.read, tpbench.report; "
        "sys.exit(' '.join(each for each in ('torch', 'triton') if each in sys.modules) or 0)"
    )
    answer = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, cwd=CONF.parent)
    assert (answer.returncode, answer.stderr) == (0, "")
