"""Checks and rewrites of the command line, and explanations of arguments that are not overrides."""

from pathlib import Path
from unittest.mock import Mock

import pytest
from omegaconf import OmegaConf

from tests.support import composed_jobs
from tpbench.launcher.command_line.arguments import (
    accepted_by_hydra,
    check_each,
    check_overrides,
    chosen_fields,
    config_folders,
    for_hydra,
    options_first,
    parse_overrides,
    rewritten,
)
from tpbench.launcher.sweep import SweepComposer, _check_names, _check_roots
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
        (["--config-dir"], "argument --config-dir/-cd: expected one argument"),
    ],
)
def test_a_wrong_value_of_an_option_is_named(arguments: list[str], message: str) -> None:
    with pytest.raises(JobError) as caught:
        options_first(arguments)
    assert str(caught.value).startswith(message)


def test_the_folder_of_configuration_files(tmp_path: Path) -> None:
    assert config_folders(["-cd", str(tmp_path), "shape=mine"])[1:] == [tmp_path]
    with pytest.raises(JobError, match=r"no such folder of configuration files: .*nowhere"):
        config_folders(["--config-dir=nowhere"])


def test_a_group_at_the_root_of_a_file_is_refused() -> None:
    _check_roots({"model": "a", "loss": "cross_entropy"}, {"model": "a", "shape": "b"})
    for group in ("measure", "model"):
        with pytest.raises(JobError, match=f"`{group}:` at the root of a file selects nothing"):
            _check_roots({group: "x"}, {group: "mine"})
    with pytest.raises(JobError, match="shape=mine: its file must begin with the line"):
        _check_roots(OmegaConf.create({"shape": {"tokens": 3}}), {"shape": "mine"})


def test_a_name_in_a_file_that_is_no_field_is_refused() -> None:
    _check_names(["tokens", "resume", "shape_workload", "hub_ids", "variant"])
    with pytest.raises(JobError, match=r"in a configuration file: no field is called tokenss, did you mean tokens"):
        _check_names(["tokenss"])


@pytest.mark.parametrize(
    ("argument", "written"),
    [
        ("block_cap=choice(4096,8192)", "block_cap=4096,8192"),
        ("model=./one,/models/two", "model_dir=./one,/models/two"),
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


def test_numbers_with_commas_are_refused() -> None:
    with pytest.raises(JobError, match=r"^vocab=131,072: a number has no comma: write vocab=131072$"):
        rewritten(["vocab=131,072"])


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


@pytest.mark.parametrize("line", ["variant=['a','b']", "loss=[a]", r"variant=folder/my.py\:one"])
def test_what_an_experiment_must_not_sweep(line: str) -> None:
    with pytest.raises(JobError, match=r"write several values as -m|only the command line may name a file"):
        check_each(parse_overrides(["variant=a", "++tokens=[1,2]", line]))


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("measure.graph=true", "no field has a dot in its name: write graph=VALUE"),
        ("loss=null", "loss=null is no choice"),
        ("variant={a: 1}", "variant={a: 1} is no choice"),
        ("experiment=tp_entropy_loss", r"with a plus: \+experiment=tp_entropy_loss"),
        ("+experiment=[peers,profile]", "experiments run one after the other"),
        ("seed=range(3,3)", r"seed=range\(3,3\) has no values"),
        ("hydra.verbose=true", "hydra.verbose=true has no effect"),
        ("+hydra.job.env_set.X=7", "has no effect"),
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
        ("impl=fsdp variant=ddp", "variant=ddp and impl=fsdp both set variant: leave out one of them"),
        ("seed=1 +seed=1", r"seed=1 and \+seed=1 both set seed: leave out one of them"),
        ("no_vocab_parallel", "no_vocab_parallel has no value: write no_vocab_parallel=VALUE"),
        (
            "use_vocab_parallel=true no_vocab_parallel=true",
            "use_vocab_parallel=true and no_vocab_parallel=true both set vocab_parallel: leave out one of them",
        ),
    ],
)
def test_a_field_is_set_once(line: str, message: str) -> None:
    with pytest.raises(JobError, match=f"^{message}$"):
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


RIGHT = "a value has no space around it, no comma at its end and one equals sign: write"
EXPLANATIONS = {
    "variant=pytorch_gather,": f"variant=pytorch_gather,: {RIGHT} variant=pytorch_gather",
    "variant=a,,b": f"variant=a,,b: {RIGHT} -m variant=a,b",
    "variant=triton_tp shape=tiny_tp2": "'variant=triton_tp shape=tiny_tp2' is one argument, because of quotes: "
    "write 2 arguments, variant=triton_tp shape=tiny_tp2",
    "tokens": "tokens has no value: write tokens=VALUE",
    "lst": "'lst' has no value, did you mean list? (write NAME=VALUE, or several values as -m NAME=VALUE1,VALUE2; "
    "commands: report, compare, history, predict, collect, compact, rows, list, doctor, docs, new, test, profile)",
    "list": "list is a command: write it first, as python -m tpbench list ...",
    "variant = a": f"variant = a: {RIGHT} variant=a",
    "tokens==64": f"tokens==64: {RIGHT} tokens=64",
    "seed=a=b": "seed=a=b: brackets and quotation marks must match, and a value with other characters of "
    "special meaning is quoted twice: \"seed='a=b'\"",
    "output_dir=it's": "output_dir=it's: brackets and quotation marks must match, and a value with other characters of "
    "special meaning is quoted twice: \"output_dir='it\\'s'\"",
    "-m seed=1,2": "'-m seed=1,2' is one argument, because of quotes: write 2 arguments, -m seed=1,2",
}


@pytest.mark.parametrize("argument", EXPLANATIONS)
def test_each_mistake_has_its_explanation(argument: str) -> None:
    with pytest.raises(JobError) as caught:
        parse_overrides([argument])
    assert str(caught.value) == EXPLANATIONS[argument]


def test_all_mistakes_come_at_once() -> None:
    with pytest.raises(JobError) as caught:
        parse_overrides(["tokens=64", "lst", "tokens==64"])
    assert str(caught.value).splitlines() == [EXPLANATIONS["lst"], EXPLANATIONS["tokens==64"]]
