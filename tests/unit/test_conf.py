"""The files in conf/ agree with the registered workloads and their fields."""

import ast
import inspect
from pathlib import Path

import pytest
import yaml

from tests.support.composed_jobs import composed, composer, job
from tpbench.job import unsupported_reason
from tpbench.kernels import KERNEL_LOSSES
from tpbench.launcher.options import command_line_names
from tpbench.workloads import variants, workloads

CONF = Path(__file__).resolve().parents[2] / "conf"


def values(file: Path) -> dict[str, object]:
    return {
        name: value for name, value in yaml.safe_load(file.read_text()).items() if name not in ("defaults", "hydra")
    }


def test_every_variant_has_its_file_and_a_preset_sets_options_that_its_variant_has() -> None:
    for name, content in {file.stem: values(file) for file in (CONF / "variant").glob("*.yaml")}.items():
        workload, variant = variants()[str(content.pop("variant"))]
        assert content.keys() <= variant.options | set(workload.graph_options) | {"graph"}
        assert name == variant.name or content
        assert not content or content.items() <= composed(f"variant={name}").items()  # no later group replaces them
    assert set(variants()) <= {file.stem for file in (CONF / "variant").glob("*.yaml")}


def test_every_variant_names_a_function_that_exists() -> None:
    """Ranks import it, and most packages of other projects are missing in tests."""
    for workload, variant in variants().values():
        name = inspect.getclosurevars(variant.prepare).nonlocals.get("attribute")
        if variant.file is not None and name is not None:  # block_fused names its file for its kernels' version
            body = ast.parse(variant.file.read_text()).body
            assert name in {getattr(statement, "name", "") for statement in body}, (workload.name, variant.name)


def test_every_loss_has_its_file() -> None:
    assert {file.stem for file in (CONF / "loss").glob("*.yaml")} == set(KERNEL_LOSSES)


def test_files_set_only_fields_that_exist() -> None:
    allowed = {"shape_workload", "hub_ids"} | command_line_names()
    for file in CONF.rglob("*.yaml"):
        assert file.parent.name == "launcher" or set(values(file)) <= allowed, file


def test_workloads_name_fields_that_exist() -> None:
    for name, workload in workloads().items():
        assert workload.name == name
        assert set(workload.headline) <= set(workload.problem.__dataclass_fields__)
        for variant in workload.variants.values():
            assert variant.options <= workload.option_defaults.keys()


STUDIES = [
    file
    for name in ("sparse_grad*", "tp_over*", "tp_stack", "linear_loss")
    for file in CONF.glob(f"experiment/{name}.yaml")
]


@pytest.mark.parametrize("file", sorted(STUDIES), ids=lambda file: str(file.stem))
def test_every_choice_of_an_experiment_makes_a_job(file: Path) -> None:
    swept = yaml.safe_load(file.read_text())["hydra"]["sweeper"]["params"]
    choices = {key: str(values).split(",") for key, values in swept.items()}
    if choices["variant"] == ["all"]:
        lines = composer().variants_of([f"{key}={choices[key][0]}" for key in ("variant", "shape")])
        choices["variant"] = [line.removeprefix("variant=") for *_, line in lines]
    first = {key: values[0] for key, values in choices.items()}
    lines = [{**first, key: value} for key, values in choices.items() for value in values]  # each choice once
    jobs = [job(*(f"{key}={value}" for key, value in line.items())) for line in lines]
    assert len({each.workload.name for each in jobs}) == 1
    refused = {each.variant for each in jobs if unsupported_reason(each)}
    assert not refused or file.stem == "linear_loss", refused  # other projects' losses lack some options
    if file.stem == "tp_overlap":
        assert {each.variant for each in jobs} == set(jobs[0].workload.variants)
    if file.stem == "sparse_grad_density":
        densities = {each.problem.tokens / each.problem.table_rows for each in jobs}
        assert min(densities) < 0.011 and max(densities) == 1.0
