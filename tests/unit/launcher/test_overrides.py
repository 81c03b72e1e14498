"""Checks and rewrites of the command line, and explanations of arguments that are not overrides."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hydra.conf import HydraConf
from omegaconf import OmegaConf

from tests.support import composed_jobs
from tpbench.launcher.command_line.arguments import (
    accepted_by_hydra,
    check_overrides,
    chosen_fields,
    for_hydra,
    rewritten,
)
from tpbench.launcher.command_line.composer import SweepComposer
from tpbench.launcher.sweep import _check_files, _check_hydra
from tpbench.settings import JobError
from tpbench.workloads import workloads

CONF = Path(__file__).resolve().parents[3] / "conf"


@pytest.mark.parametrize(
    ("argument", "accepted"),
    [
        ("block_cap=4096,8192", "block_cap='4096','8192'"),
        ("block_cap=auto,4096", "block_cap=auto,'4096'"),
        ("block_cap='4096'", "block_cap='4096'"),
        ("shape=v32k_tp2,tiny_tp2", "shape=v32k_tp2,tiny_tp2"),
        ("tokens=64,128", "++tokens=64,128"),
        ("-m", "-m"),
        ("--config-dir=x", "--config-dir=x"),
        ("hydra.launcher.account=12e3", "hydra.launcher.account='12e3'"),
        ("hydra.launcher.poll_s=0.5", "hydra.launcher.poll_s=0.5"),
        ("output_dir=1.10,true,rows/a", "++output_dir='1.10','true',rows/a"),
        ("++dtype='1 2',3,${x}", "++dtype='1 2',3,${x}"),
        ("model_dir=null,a b/c=1", "++model_dir=null,'a b/c=1'"),
        ("~width", "~width"),
        ("+experiment=peers", "+experiment=peers"),
    ],
)
def test_texts_are_quoted_for_hydra_and_fields_are_forced(argument: str, accepted: str) -> None:
    assert accepted_by_hydra([argument]) == [accepted]


@pytest.mark.parametrize(
    ("arguments", "ordered"),
    [
        (["seed=1,2", "-m", "tp_size=2"], ["-m", "++seed=1,2", "++tp_size=2"]),
        (
            ["seed=1", "--cfg", "job", "tp_size=2", "--resolve"],
            ["--cfg", "job", "--resolve", "++seed=1", "++tp_size=2"],
        ),
    ],
)
def test_options_may_stand_between_overrides(arguments: list[str], ordered: list[str]) -> None:
    assert for_hydra(arguments)[:-1] == ordered


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--multirun=true", "seed=1"], "argument --multirun/-m: ignored explicit argument 'true'"),
        (["seed=1", "--cfg", "tp_size=2"], "argument --cfg/-c: invalid choice: 'tp_size=2'"),
        (["--config-dir"], "argument --config-dir/-cd: expected one argument"),
        (["--config-dir=nowhere"], "no such folder of configuration files: nowhere"),
        (["-x"], "no such option: -x"),
    ],
)
def test_a_wrong_value_of_an_option_is_named(arguments: list[str], message: str) -> None:
    with pytest.raises(JobError) as caught:
        for_hydra(arguments)
    assert str(caught.value).startswith(message)


def test_a_group_at_the_root_of_a_file_is_refused() -> None:
    _check_files({"model": "a", "loss": "cross_entropy"}, {"model": "a", "shape": "b"}, [])
    for group in ("measure", "model"):
        with pytest.raises(JobError, match=f"`{group}:` at the root of a file selects nothing"):
            _check_files({group: "x"}, {group: "mine"}, [])
    with pytest.raises(JobError, match="shape=mine: its file must begin with the line"):
        _check_files(OmegaConf.create({"shape": {"tokens": 3}}), {"shape": "mine"}, [])


@pytest.mark.parametrize(
    "node",
    [
        {"sweep": {"dir": "/data"}},  # a folder that would be removed
        {"job": {"env_set": {"X": "7"}}},
        {"verbose": True},
        {"callbacks": {"x": {"_target_": "os.getcwd"}}},
        {"launcher": {"x": {"_target_": "os.getcwd"}}},
        {"launcher": {"_target_": "os.getcwd"}},
        {"sweeper": {"params": {"seed": "${hydra.launcher}"}}},
    ],
)
def test_a_setting_of_hydra_in_a_file_is_refused_if_nothing_reads_it_or_it_is_code(node: dict[str, Any]) -> None:
    own = {"sweeper": {"_target_": "hydra._internal.core_plugins.basic_sweeper.BasicSweeper", "params": {"seed": "1"}}}
    own |= {"launcher": {"_target_": "hydra_plugins.tpbench.TorchrunLauncher", "account": "a"}}
    plain = OmegaConf.merge(OmegaConf.structured(HydraConf), OmegaConf.load(CONF / "config.yaml").hydra, own)
    _check_hydra(OmegaConf.create({"hydra": plain}).hydra)
    with pytest.raises(JobError, match=r"in a configuration file: (hydra\.[a-z_.]+ has no effect|_target_ names)"):
        _check_hydra(OmegaConf.create({"hydra": OmegaConf.merge(plain, node)}).hydra)


def test_a_name_in_a_file_that_is_no_field_is_refused() -> None:
    _check_files({}, {}, ["tokens", "resume", "shape_workload", "hub_ids", "variant"])
    with pytest.raises(JobError, match=r"in a configuration file: no field is called tokenss, did you mean tokens"):
        _check_files({}, {}, ["tokenss"])


@pytest.mark.parametrize(
    ("argument", "written"),
    [
        ("model=/models/one,/two", "model=|models|one,|two"),
        ("model=qwen3_8b,llama3_8b", "model=qwen3_8b,llama3_8b"),
        ("model=Qwen/Qwen3-0.6B,meta-llama/Llama-3.1-8B", "model=qwen3_0p6b,llama3_8b"),
        ("model=meta-llama/Llama-3-8B,meta-llama/Meta-Llama-3-8B", "model=llama3_0_8b,llama3_0_8b"),
        ("model=Qwen/Qwen2.5-7B-Instruct", "model=qwen2p5_7b"),
        ("model=Qwen/Qwen9-1B", "model=Qwen|Qwen9-1B"),
        ("hydra.launcher.partition=gpu", "hydra.launcher.partition=gpu"),
        ("model=a,/d", "model=a,|d"),
    ],
)
def test_ids_and_folders_of_models_become_choices(argument: str, written: str) -> None:
    assert " ".join(rewritten([argument])) == written


def test_cells_that_share_their_choices_have_their_own_values() -> None:
    composer = composed_jobs.composer()
    lines = (["seed=1"], ["seed=2", "output_dir=rows/${hydra:job.num}"], ["seed=2", "output_dir=rows/${seed}"], [])
    cells = [composer.values(accepted_by_hydra(each), index) for index, each in enumerate(lines)]
    assert [(cell["seed"], cell["output_dir"]) for cell in cells] == [
        (1, "outputs"), (2, "rows/1"), (2, "rows/2"), (0, "outputs"),
    ]  # fmt: skip


def variants_of(shape: str, variant: str) -> list[str]:
    """Return the variants that a value means beside a shape."""
    lines = [*accepted_by_hydra(rewritten([f"shape={shape}", f"variant={variant}"])), "layers=2"]  # of an experiment
    jobs = composed_jobs.composer().variants_of(lines)
    return [line.removeprefix("variant=") for lines in jobs for line in lines if line.startswith("variant=")]


def test_all_variants_are_those_of_the_shape() -> None:
    names = list(workloads()["tp_block"].variants)
    assert variants_of("tiny_block_tp2", "all") == names
    assert variants_of("tiny_tp2", "triton_tp") == ["triton_tp"]


def test_a_file_may_choose_all_variants() -> None:
    composer = SweepComposer(Mock(), OmegaConf.create({"variant": "all"}))
    composer.compose = lambda sweep, lines: OmegaConf.create({"shape_workload": "linear_loss"})
    names = list(workloads()["linear_loss"].variants)
    assert composer.variants_of(["++seed=1"]) == [("++seed=1", f"variant={name}") for name in names]
    assert composer.variants_of(["variant=one"]) == [("variant=one",)]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("loss=null", "loss=null is not one choice"),
        ("variant={a: 1}", "variant={a: 1} is not one choice"),
        ("variant=['a','b']", "write several as -m variant=A,B"),
        ("+experiment=[peers,profile]", "experiments run one after the other"),
        ("hydra.verbose=true", "hydra.verbose=true has no effect"),
        ("+hydra.job.env_set.X=7", "has no effect"),
        ("hydra.mode=RUN", "has no effect"),
    ],
)
def test_an_override_that_hydra_would_accept_is_refused_if_it_can_mean_nothing(argument: str, message: str) -> None:
    with pytest.raises(JobError, match=message):
        check_overrides([argument])


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ("impl=autotp", {"variant": "autotp", "model": "qwen3_32b", "steps": 20}),
        (
            "impl=fsdp shape=tiny_train_tp2 attn_impl=eager gradient_accumulation_steps=2 num_training_steps=10",
            {"variant": "fsdp", "tp_size": 2, "attention": "eager", "accumulate": 2, "steps": 8},
        ),
        ("impl=autotp num_training_steps=10 warmup_steps=3 log_interval=2", {"steps": 7, "log_interval": 2}),
        ("impl=autotp use_vocab_parallel=false", {"vocab_parallel": False}),
        ("impl=autotp no_vocab_parallel=true", {"vocab_parallel": False}),
    ],
)
def test_names_of_the_older_benchmark(line: str, fields: dict[str, object]) -> None:
    values = composed_jobs.composed(*for_hydra(line.split())[:-1])
    assert {name: values[name] for name in fields} == fields


@pytest.mark.parametrize(
    ("line", "right"),
    [
        (
            "--impl autotp --model_name Qwen/Qwen3-32B --dp_size 2 --num_training_steps=100 --no_vocab_parallel",
            "impl=autotp model_name=Qwen/Qwen3-32B dp_size=2 num_training_steps=100 no_vocab_parallel=true",
        ),
        ("-m seed=1 --tokens=5 --dry-run", "-m seed=1 tokens=5 dry_run=true"),
        ("--impl autotp,fsdp", "-m impl=autotp,fsdp"),
        ("--tp 2 --dtype float16", "tp_size=2 dtype=float16"),
    ],
)
def test_dashes_are_answered_with_the_whole_right_line(line: str, right: str) -> None:
    with pytest.raises(JobError, match=f"no dashes in front: write python -m tpbench {right}$"):
        for_hydra(line.split())


@pytest.mark.parametrize("steps", ["5", "abc"])
def test_steps_of_the_older_benchmark_include_the_warm_up(steps: str) -> None:
    with pytest.raises(JobError, match=f"^num_training_steps={steps} includes warmup_steps=5: it must be a larger"):
        composed_jobs.composed(*for_hydra(["impl=fsdp", "shape=qwen3_8b_tp4", f"num_training_steps={steps}"])[:-1])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("impl=fsdp variant=ddp", "variant=fsdp and variant=ddp both set variant: leave out one of them"),
        ("seed=1 +seed=1", r"seed=1 and \+seed=1 both set seed: leave out one of them"),
        ("use_vocab_parallel=true no_vocab_parallel=true", "both set vocab_parallel: leave out one of them"),
    ],
)
def test_a_field_is_set_once(line: str, message: str) -> None:
    with pytest.raises(JobError, match=message):
        for_hydra(line.split())


def test_chosen_fields_leave_out_groups_of_every_workload() -> None:
    chosen = chosen_fields(["variant=triton_tp", "++tokens=64", "hydra.sweep.dir=x", "+experiment=e", "seed=1"])
    assert chosen == ["tokens", "seed"]
    assert chosen_fields(["variant=sparse_all_to_all", "loss=forward_kl", "block_cap=4096"]) == ["loss", "block_cap"]


def test_values_may_refer_to_others_and_to_hydras_own_configuration() -> None:
    composed = composed_jobs.composed
    assert composed("output_dir=o-${dp_size}", "dp_size=3")["output_dir"] == "o-3"
    line = "output_dir=o-${hydra:job.num}-${hydra:runtime.choices.loss}"
    assert composed(line, "loss=forward_kl")["output_dir"] == "o-0-forward_kl"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("variant=pytorch_gather,", "values are separated by single commas without spaces"),
        ("variant=a,,b", "values are separated by single commas without spaces"),
        ("tokens==64", "is not understood"),
        ("output_dir=it's", r"is quoted|are quoted twice"),
        ("tokens", r"'tokens' has no value \(write NAME=VALUE"),
        ("no_vocab_parallel", "'no_vocab_parallel' has no value"),
        ("lst", r"'lst' has no value, did you mean list\? .*commands come first: report, compare"),
    ],
)
def test_what_is_no_override_is_explained(argument: str, message: str) -> None:
    with pytest.raises(JobError, match=message):
        check_overrides([argument])


def test_all_mistakes_come_at_once() -> None:
    with pytest.raises(JobError) as caught:
        check_overrides(["tokens=64", "lst", "tokens==64", "outputs"])
    lines = str(caught.value).splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["'lst'", "tokens==64", "'outputs'"]
    assert "commands come first" in lines[0] and lines[2].endswith("'outputs' has no value, did you mean output_dir?")
