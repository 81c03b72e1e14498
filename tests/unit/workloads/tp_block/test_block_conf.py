"""The configuration of the transformer block: every shape and every experiment makes valid jobs."""

from __future__ import annotations

import pytest
import yaml

from tests.support.command import ROOT
from tests.support.composed_jobs import composed, job
from tpbench.job import parse_job, unsupported_reason
from tpbench.launcher.planning.plan import ThisHost, skip_reason
from tpbench.workloads.tp_block import WORKLOAD

EXPERIMENTS = ["tp_overlap", "tp_overlap_auto", "tp_overlap_memory", "tp_overlap_mlp", "tp_overlap_parts", "tp_stack"]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_choice_of_an_experiment_makes_a_job(name: str) -> None:
    content = yaml.safe_load((ROOT / "conf/experiment" / f"{name}.yaml").read_text())
    choices = {key: str(values).split(",") for key, values in content["hydra"]["sweeper"]["params"].items()}
    first = {key: values[0] for key, values in choices.items()}
    lines = [{**first, key: value} for key, values in choices.items() for value in values]
    own = {"part", "save_gathered"}  # config.yaml has no default for these
    made = [job(*(f"{'++' * (key in own)}{key}={value}" for key, value in line.items())) for line in lines]
    assert {each.workload.name for each in made} == {"tp_block"} and not [
        each for each in made if unsupported_reason(each)
    ]
    if name == "tp_overlap":
        assert {each.variant for each in made} == set(WORKLOAD.variants)


@pytest.mark.parametrize("shape", sorted(file.stem for file in (ROOT / "conf/shape").glob("*_block_*.yaml")))
def test_shapes_fit_every_variant_at_every_measured_length(shape: str) -> None:
    values = composed("variant=block_tp", f"shape={shape}")
    for tokens in (values["tokens"], *(() if shape.startswith("tiny") else (512, 2048))):
        for name in WORKLOAD.variants:
            assert unsupported_reason(parse_job({**values, "tokens": tokens, "variant": name})) is None
    assert f"tp{values['tp_size']}" == shape.rpartition("_")[2]


def test_variants_that_need_a_gpu_are_skipped_on_a_cpu() -> None:
    for name, variant in WORKLOAD.variants.items():
        reason = skip_reason(job(f"variant={name}", "shape=tiny_block_tp2", "device=cpu"), ThisHost(gpus=0))
        assert reason == ("needs a CUDA GPU" if variant.requires_cuda else None)
