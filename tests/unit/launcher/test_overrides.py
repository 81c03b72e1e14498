"""Checks and rewrites of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpbench.launcher.command_line import rewrites
from tpbench.launcher.command_line.checks import (
    check_names,
    check_overrides,
    check_roots,
    options_first,
    unknown_choice,
)
from tpbench.launcher.command_line.rewrites import (
    check_defaults,
    chosen_fields,
    config_folders,
    for_hydra,
    rewritten,
)
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
        ("hydra.sweep.dir=x", "hydra.sweep.dir=x"),
        ("~width", "~width"),
        ("+experiment=peers", "+experiment=peers"),
    ],
)
def test_numbers_that_name_a_choice_are_quoted_for_hydra_and_fields_are_forced(argument: str, accepted: str) -> None:
    assert for_hydra([argument]) == [accepted]


@pytest.mark.parametrize(
    ("arguments", "ordered"),
    [
        (["seed=1,2", "-m", "tp_size=2"], ["-m", "seed=1,2", "tp_size=2"]),
        (["seed=1", "--cfg", "job", "tp_size=2", "--resolve"], ["--cfg", "job", "--resolve", "seed=1", "tp_size=2"]),
        (["~width", "--multirun", "-m", "+experiment=peers"], ["--multirun", "-m", "~width", "+experiment=peers"]),
    ],
)
def test_options_may_stand_between_overrides(arguments: list[str], ordered: list[str]) -> None:
    assert options_first(arguments) == ordered


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--multirun=true", "seed=1"], "argument --multirun/-m: ignored explicit argument 'true'"),
        (["seed=1", "--cfg", "tp_size=2"], "argument --cfg/-c: invalid choice: 'tp_size=2'"),
        (["-measure=quick"], "-measure=quick: a field has no dash in front (measure=quick), and"),
        (["--config-dir"], "argument --config-dir/-cd: expected one argument"),
    ],
)
def test_a_wrong_value_of_an_option_is_named(arguments: list[str], message: str) -> None:
    with pytest.raises(JobError) as caught:
        options_first(arguments)
    assert str(caught.value).startswith(message)


def test_the_folders_of_the_search_path(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text(f"hydra:\n  searchpath: [file://{tmp_path}/site]\n")
    site = tmp_path / "site"
    site.mkdir()
    assert config_folders(["shape=mine", f"hydra.searchpath=[file://{site}]"])[1:] == [site]
    assert config_folders(["shape=mine", f"--config-dir={tmp_path}", "-cn", "site"])[1:] == [tmp_path, site]
    assert config_folders(["-cd", str(tmp_path), "shape=mine"])[1:] == [tmp_path]


def test_folders_and_files_of_configuration_that_are_missing_or_build_on_nothing_are_named(tmp_path: Path) -> None:
    site = f"--config-dir={tmp_path}"
    for argument in ("--config-dir=nowhere", "hydra.searchpath=[nowhere]", "hydra.searchpath=[pkg://numpy.nowhere]"):
        with pytest.raises(JobError, match=r"no such folder of configuration files: .*nowhere"):
            check_defaults([argument])
    (tmp_path / "ours.yaml").write_text("tokens: 3\n")
    with pytest.raises(JobError, match="no configuration file is called our, did you mean ours"):
        check_defaults([site, "-cn", "our"])
    with pytest.raises(JobError, match=r"ours.yaml needs a list `defaults:`"):
        check_defaults([site, "-cn", "ours"])
    (tmp_path / "ours.yaml").write_text("defaults: [config, _self_]\ntokens: 3\n")
    check_defaults([site, "-cn", "ours.yaml"])


def test_a_group_at_the_root_of_a_file_is_refused() -> None:
    check_roots({"model": "a", "loss": "cross_entropy"}, {"model": "a", "shape": "b"})
    for group, value in (("shape", {"tokens": 3}), ("measure", "x"), ("model", "x")):
        with pytest.raises(JobError, match=f"`{group}:` at the root .*: write `- override {group}: NAME` in .*global"):
            check_roots({group: value}, {group: "mine"})
    with pytest.raises(JobError, match=r"write `- experiment: NAME`"):
        check_roots({"experiment": "x"}, {"shape": "b"})


def test_a_name_in_a_file_that_is_no_field_is_refused() -> None:
    check_names(["tokens", "resume", "shape_workload", "hub_ids", "variant"])
    with pytest.raises(JobError, match=r"in a configuration file: no field is called tokenss, did you mean tokens"):
        check_names(["tokenss"])


@pytest.mark.parametrize(
    ("argument", "written"),
    [
        ("block_cap=choice(4096,8192)", "block_cap=4096,8192"),
        ("variant=glob(*tp*)", "variant=triton_tp,pytorch_tp_manual"),
        ("model=./one,/models/two", "model_dir=./one,/models/two"),
        ("model='./a,b'", "model_dir='./a,b'"),
        ("train.loss=tpbench", "train_loss=tpbench"),
        ("model=qwen3_8b,llama3_8b", "model=qwen3_8b,llama3_8b"),
        ("model=Qwen/Qwen3-0.6B,meta-llama/Llama-3.1-8B", "model=qwen3_0p6b,llama3_8b"),
        ("model=meta-llama/Llama-3-8B,meta-llama/Meta-Llama-3-8B", "model=llama3_0_8b,llama3_0_8b"),
        ("model=Qwen/Qwen2.5-7B-Instruct", "model=qwen2p5_7b"),
        ("model=Qwen/Qwen9-1B", "model_dir=Qwen/Qwen9-1B"),
        ("hydra.launcher.partition=gpu", "hydra.launcher.partition=gpu"),
        ("model=a,./b,c,/d", "model=a,c model_dir=null,./b,/d"),
    ],
)
def test_lists_of_choices_units_and_models_are_written_out(argument: str, written: str) -> None:
    assert " ".join(rewritten([argument])) == written


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("variant=glob(block_*)", "no variant of entropy_loss, the workload of the shape, matches glob(block_*)"),
        ("vocab=131,072", "vocab=131,072: a number has no comma: write vocab=131072"),
    ],
)
def test_patterns_without_a_match_and_numbers_with_commas_are_refused(argument: str, message: str) -> None:
    with pytest.raises(JobError) as caught:
        rewritten([argument])
    assert str(caught.value).startswith(message)


def test_all_variants_are_those_of_the_shape(tmp_path: Path) -> None:
    names = list(workloads()["tp_block"].variants)
    written = f"variant={','.join(names)}"
    assert rewritten(["shape=tiny_block_tp2", "variant=all"])[1] == written
    assert rewritten(["shape=tiny_block_tp2", "variant=all,block_tp,mine"])[1] == f"{written},mine"
    assert rewritten(["+experiment=tp_stack", "variant=all"])[1] == written
    (tmp_path / "shape").mkdir()
    (tmp_path / "shape/mine.yaml").write_text("shape_workload: tp_block\n")
    (tmp_path / "site.yaml").write_text("defaults: [config, override shape: mine]\n")
    folder, search = f"--config-dir={tmp_path}", f"hydra.searchpath=[file://{tmp_path}]"
    for options in ([folder, "shape=mine"], ["-cd", str(tmp_path), "-cn", "site"], [search, "shape=mine"]):
        assert rewritten([*options, "variant=all"])[-1] == written


def test_an_experiment_needs_its_plus() -> None:
    with pytest.raises(JobError, match=r"with a plus: \+experiment=tp_entropy_loss"):
        check_overrides(["experiment=tp_entropy_loss"])


@pytest.mark.parametrize(
    ("line", "written"),
    [
        ("impl=autotp", "variant=autotp shape=qwen3_32b_tp4"),
        (
            "impl=fsdp shape=tiny_train_tp2 attn_impl=eager gradient_accumulation_steps=2 num_training_steps=10",
            "variant=fsdp shape=tiny_train_tp2 attention=eager accumulate=2 steps=8",
        ),
        ("num_training_steps=10,20 shape=qwen3_8b_tp4", "steps=5,15 shape=qwen3_8b_tp4"),
        ("num_training_steps=10 warmup_steps=3", "steps=7 warmup_steps=3"),
        ("use_vocab_parallel=false", "vocab_parallel=false"),
        ("no_vocab_parallel=true log_interval=2", "vocab_parallel=false log_interval=2"),
    ],
)
def test_names_of_the_older_benchmark(line: str, written: str) -> None:
    assert rewrites.own_names(line.split()) == written.split()


@pytest.mark.parametrize(
    ("line", "right"),
    [
        (
            "--impl autotp --model_name Qwen/Qwen3-32B --dp_size 2 --num_training_steps=100 --no_vocab_parallel",
            "variant=autotp model=Qwen/Qwen3-32B dp_size=2 steps=95 vocab_parallel=false shape=qwen3_32b_tp4",
        ),
        ("-m seed=1 --tokens=5 --dry-run", "-m seed=1 tokens=5 dry_run=true"),
    ],
)
def test_dashes_are_answered_with_the_whole_right_line(line: str, right: str) -> None:
    with pytest.raises(JobError, match=f"no dashes in front: write python -m tpbench {right}$"):
        rewrites.own_names(line.split())


def test_steps_of_the_older_benchmark_include_the_warm_up() -> None:
    with pytest.raises(JobError, match="num_training_steps=5 includes warmup_steps=5: it must be a larger number"):
        rewrites.own_names(["shape=qwen3_8b_tp4", "num_training_steps=5"])


def test_chosen_fields_leave_out_groups_of_every_workload() -> None:
    chosen = chosen_fields(["variant=triton_tp", "++tokens=64", "hydra.sweep.dir=x", "+experiment=e", "seed=1"])
    assert chosen == ["tokens", "seed"]
    assert chosen_fields(["variant=sparse_auto", "loss=forward_kl", "block_cap=4096"]) == ["loss", "block_cap"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--frobnicate", "seed=1"], "no such option: --frobnicate (python -m tpbench --help lists them)"),
        (
            ["-m", "variant=[triton_tp,pytorch_gather]"],
            "variant=[triton_tp,pytorch_gather]: write several values as -m variant=triton_tp,pytorch_gather",
        ),
    ],
)
def test_the_answer_to_a_mistake_names_what_would_be_valid(arguments: list[str], said: str) -> None:
    with pytest.raises(JobError) as caught:
        check_overrides(arguments)
    assert str(caught.value).startswith(said)


def test_a_model_may_also_be_a_folder() -> None:
    assert unknown_choice("model", "gpt2", ["tiny_qwen3"]) == (
        "no model is called gpt2 (valid: tiny_qwen3); a path to a local folder with a config.json is valid, too"
    )
