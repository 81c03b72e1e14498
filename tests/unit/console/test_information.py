"""Help fits a screen, and the list has every choice."""

from pathlib import Path

import pytest

from tpbench.console import information, listing
from tpbench.console.help import HELP
from tpbench.job import field_names
from tpbench.workloads import variants

CONF = Path(__file__).parents[3] / "conf"


def test_help_fits_a_screen():
    lines = HELP.splitlines()
    assert len(lines) <= 25 and max(map(len, lines)) <= 80


def test_help_names_what_exists():
    words = {word.split("=")[0] for line in HELP.splitlines()[11:17] for word in line.split()}
    for name in ("tokens", "vocab", "tp_size", "dp_size", "dtype", "seed", "device", "memory_limit_gib", "timeout_s"):
        assert name in words and name in field_names()


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["-m", "--help"]])
def test_help_is_printed(arguments, capsys):
    assert information(arguments) == 0 and capsys.readouterr().out == HELP


@pytest.mark.parametrize("arguments", [[], ["variant=triton_tp"], ["-m", "+experiment=peers"], ["--cfg", "job"]])
def test_a_job_is_no_command_for_information(arguments):
    assert information(arguments) is None


def test_the_list_has_every_choice(capsys):
    assert information(["list"]) == 0
    said = capsys.readouterr().out
    names = {line.split()[0] for line in said.splitlines() if line.startswith("  ")}
    wanted = {file.stem for group in ("shape", "model", "loss", "experiment") for file in (CONF / group).glob("*.yaml")}
    assert names == wanted | set(variants())
    assert information(["list", "shapes"]) == 2


def test_the_list_has_the_reason_of_what_cannot_run():
    def availability(title, gpus):
        found = [entries for heading, entries in listing.sections(gpus) if heading.startswith(title)]
        return {entry.name: entry.availability for entries in found for entry in entries}

    assert availability("shape=", 4)["v131k_tp8"] == "no: needs 8 GPUs, found 4"
    assert availability("shape=", 8)["v131k_tp8"] == "yes" and availability("shape=", 0)["v131k_tp8"] == "on the CPU"
    assert availability("variant=", 0)["triton_tp"] == "interpreted: right, but no measurement"
    assert availability("variant=", 4)["triton_tp"] == "yes"
    assert availability("variant=", 0)["ddp"] == "yes"  # Triton only with an option


def test_every_entry_has_a_summary():
    for _, entries in listing.sections(0):
        assert all(entry.summary for entry in entries)
