"""Help fits a screen, and the list has every choice."""

import re
from pathlib import Path

import pytest

from tests.support.composed_jobs import job
from tpbench.console import HELP, information, listing
from tpbench.console.listing import WIDTH
from tpbench.job import unsupported_reason
from tpbench.launcher.options import COMMANDS, SlurmSettings, command_line_names
from tpbench.workloads import variants

CONF = Path(__file__).parents[3] / "conf"


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["-m", "--help"], ["help"]])
def test_help_is_printed(arguments, capsys):
    assert information(arguments) == 0 and capsys.readouterr().out == HELP


@pytest.mark.parametrize("arguments", [[], ["variant=triton_tp"], ["-m", "+experiment=peers"], ["--cfg", "job"]])
def test_a_job_is_no_command_for_information(arguments):
    assert information(arguments) is None


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("list", "doctor")])
def test_each_command_has_a_help_that_names_it(name, capsys):
    with pytest.raises(SystemExit) as ended:
        information([name, "--help"])
    assert ended.value.code == 0 and f"usage: tpbench {name} " in capsys.readouterr().out
    assert name in HELP


def test_pages_are_listed_and_printed(capsys):
    assert information(["docs"]) == 0
    assert re.search(r"^numbers +How a number is made$", capsys.readouterr().out, re.MULTILINE)
    assert information(["docs", "columns"]) == 0
    assert capsys.readouterr().out.startswith("# Columns of a row\n")
    assert information(["docs", "colums"]) == 2 and "did you mean columns" in capsys.readouterr().err


def printed(capsys, *arguments):
    assert information(["list", *arguments]) == 0
    return capsys.readouterr().out


def listed(text):
    return {line.split()[0] for line in text.splitlines() if line.startswith("  ")}


def names(*groups):
    return {file.stem for group in groups for file in (CONF / group).glob("*.yaml")}


@pytest.mark.parametrize("gpus", [0, 1, 8])
def test_the_overview_fits_a_screen_and_has_every_name(gpus):
    text = listing.overview("a machine with a name of usual length", gpus)
    lines = text.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= WIDTH
    words = {word.lstrip("~-") for word in text.split()}
    assert words >= names("variant", "model", "loss", "experiment") | set(variants()) | {"tiny_tp2", "tiny_train_tp2"}
    assert ("~triton_tp" in text) == (gpus == 0)


def test_the_overview_names_lists_that_can_be_printed(capsys):
    commands = re.findall(r"^  list (\S+)", printed(capsys), re.MULTILINE)
    assert commands == ["entropy_loss", "variant=triton_tp", "variants"]
    for command in commands:
        assert printed(capsys, command)


def test_kinds_of_choices_are_listed_alone(capsys):
    for topic, group in (("shapes", "shape"), ("models", "model"), ("losses", "loss"), ("experiments", "experiment")):
        assert listed(printed(capsys, topic)) == names(group)
    assert listed(printed(capsys, "variants")) == names("variant")
    everything = names("variant", "shape", "model", "loss", "experiment", "measure")
    assert listed(printed(capsys, "all")) == everything


def test_a_workload_has_its_variants_shapes_and_fields(capsys):
    text = printed(capsys, "entropy_loss")
    assert listed(text.partition("Fields of")[0]) >= {"triton_tp", "pytorch_gather", "v131k_tp8"}
    assert "block_tp" not in text and "llama8b_block_tp2" not in text
    assert re.search(r"^  tokens=\S* +\w", text.partition("Fields of entropy_loss")[2], re.MULTILINE)


def test_the_list_of_fields_has_every_field(capsys):
    text = printed(capsys, "fields")
    found = {line.partition("=")[0].strip() for line in text.splitlines() if re.match(r"  \w+=", line)}
    assert found == command_line_names() - {"world_size"} | set(SlurmSettings.__dataclass_fields__)
    assert max(map(len, text.splitlines())) <= 100


def test_a_variant_has_its_options_and_a_command(capsys):
    text = printed(capsys, "variant=triton_tp")
    assert "variant of entropy_loss" in text
    assert {line.partition("=")[0].strip() for line in text.splitlines() if re.match(r"  \w+=\w", line)} == {
        "block_cap", "exchange", "algorithm", "autograd", "entropy", "label_smoothing", "z_loss", "softcap",
        "entropy_weight",
    }  # fmt: skip
    assert text.splitlines()[-1] == "python -m tpbench variant=triton_tp shape=tiny_tp2 measure=quick"


@pytest.mark.parametrize("name", ["quack", "linear_unfused", "sparse_all_to_all", "block_copy_engine", "fsdp"])
def test_the_command_of_a_variant_is_a_job_that_the_variant_supports(name):
    line = listing.description("variant", name, 0).splitlines()[-1]
    overrides = line.removeprefix("python -m tpbench ").split()
    assert unsupported_reason(job(*overrides)) is None


@pytest.mark.parametrize(
    "topic, message",
    [
        ("shaps", "no topic of list is called shaps, did you mean shapes?"),
        ("variant=triton", "no variant is called triton, did you mean triton_tp"),
        ("varient=triton_tp", "no group is called varient, did you mean variant?"),
    ],
)
def test_a_wrong_topic_is_explained(topic, message, capsys):
    assert information(["list", topic]) == 2
    assert f"tpbench: {message}" in capsys.readouterr().err


def test_the_list_has_the_reason_of_what_cannot_run():
    def availability(title, gpus):
        found = [each for heading, each in listing.sections_of("all", gpus) if heading.startswith(title)]
        return {entry.name: entry.availability for each in found for entry in each}

    assert availability("shape=", 4)["v131k_tp8"] == "no: needs 8 GPUs, found 4"
    assert availability("shape=", 8)["v131k_tp8"] == "yes" and availability("shape=", 0)["v131k_tp8"] == "on the CPU"
    assert availability("variant=", 0)["triton_tp"] == "interpreted: correct, but no measurement"
    assert availability("variant=", 4)["triton_tp"] == "yes"
    assert availability("variant=", 0)["ddp"] == "yes"  # Triton only with an option
