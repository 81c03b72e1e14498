"""Explanations of arguments that are not overrides."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpbench.launcher.command_line.checks import check_overrides, parse_overrides
from tpbench.settings import JobError

NAMES = {"tokens": "VALUE", "variant": "VALUE", "resume": "true"}
CONF = Path(__file__).resolve().parents[3] / "conf"

EXPLANATIONS = {
    "variant=pytorch_gather,": "variant=pytorch_gather,: a value is missing beside a comma: write "
    "variant=pytorch_gather",
    "variant=a,,b": "variant=a,,b: a value is missing beside a comma: write -m variant=a,b",
    "variant=triton_tp shape=tiny_tp2": "'variant=triton_tp shape=tiny_tp2' is one argument, because of the quotes: "
    "write 2 arguments, variant=triton_tp shape=tiny_tp2",
    "tokens": "tokens has no value: write tokens=VALUE",
    "resume": "resume has no value: write resume=true",
    "lst": "'lst' has no value, did you mean list? (write NAME=VALUE, or several values as -m NAME=VALUE1,VALUE2; "
    "commands: report, compare, history, predict, collect, compact, list, doctor, docs, new, test, profile)",
    "list": "list is a command: write it first, as python -m tpbench list ...",
    "variant = a": "'variant = a' has spaces: write variant=a",
    "": "an argument is empty: write NAME=VALUE (is a variable of the shell not set?)",
    "tokens==64": "tokens==64 has two equals signs: write tokens=64",
    "tokens=[1,2": "tokens=[1,2: [ and ] do not match",
    "model='./a": "model='./a: a quotation mark is not closed",
    "output_dir=a=b": "output_dir=a=b: the value has characters with a special meaning: quote it twice, "
    "\"output_dir='a=b'\"",
}


@pytest.mark.parametrize("argument", EXPLANATIONS)
def test_each_mistake_has_its_explanation(argument: str) -> None:
    with pytest.raises(JobError) as caught:
        parse_overrides([argument], NAMES)
    assert str(caught.value) == EXPLANATIONS[argument]


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        (["tokens", "64"], "tokens=64"),
        (["tokens", "=", "64,", "128"], "tokens=64,128"),
        (["tokens:", "64"], "tokens=64"),
        (["tokens=", "64"], "tokens=64"),
        (["tokens=64,", "128,", "256"], "tokens=64,128,256"),
    ],
)
def test_an_override_with_spaces_is_one_mistake(arguments: list[str], right: str) -> None:
    with pytest.raises(JobError) as caught:
        parse_overrides([*arguments, "variant=a"], NAMES)
    assert str(caught.value) == f"'{' '.join(arguments)}' has spaces: write {right}"


def test_a_word_behind_an_override_is_perhaps_another_value_of_it() -> None:
    with pytest.raises(JobError, match=r"^'b' has no value \(write NAME=VALUE, or several values as -m variant=a,b\)$"):
        parse_overrides(["variant=a", "b"], NAMES)


def test_what_the_explanations_propose_is_valid() -> None:
    parse_overrides(["variant=pytorch_gather", "variant=a,b", "variant=triton_tp", "tokens=64", "output_dir='a=b'"])


def test_all_mistakes_come_at_once_and_a_command_is_only_the_first_word() -> None:
    with pytest.raises(JobError) as caught:
        parse_overrides(["tokens=64", "lst", "tokens==64"])
    first, second = str(caught.value).splitlines()
    assert "did you mean" not in first
    assert second == EXPLANATIONS["tokens==64"]


def test_a_quoted_line_with_its_m() -> None:
    with pytest.raises(JobError, match=r"'-m seed=1,2' is one argument, because of the quotes: write -m seed=1,2 wit"):
        check_overrides(["-m seed=1,2"], CONF)
