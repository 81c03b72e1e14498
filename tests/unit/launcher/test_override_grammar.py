"""Explanations of arguments that are not overrides."""

from __future__ import annotations

import pytest

from tpbench.launcher.command_line.arguments import parse_overrides
from tpbench.settings import JobError

RIGHT = "a value has no space around it, no comma at its end and one equals sign: write"
EXPLANATIONS = {
    "variant=pytorch_gather,": f"variant=pytorch_gather,: {RIGHT} variant=pytorch_gather",
    "variant=a,,b": f"variant=a,,b: {RIGHT} -m variant=a,b",
    "variant=triton_tp shape=tiny_tp2": "'variant=triton_tp shape=tiny_tp2' is one argument, because of the quotes: "
    "write 2 arguments, variant=triton_tp shape=tiny_tp2",
    "tokens": "tokens has no value: write tokens=VALUE",
    "lst": "'lst' has no value, did you mean list? (write NAME=VALUE, or several values as -m NAME=VALUE1,VALUE2; "
    "commands: report, compare, history, predict, collect, compact, list, doctor, docs, new, test, profile)",
    "list": "list is a command: write it first, as python -m tpbench list ...",
    "variant = a": f"variant = a: {RIGHT} variant=a",
    "": "an argument is empty: write NAME=VALUE (is a variable of the shell not set?)",
    "tokens==64": f"tokens==64: {RIGHT} tokens=64",
    "output_dir=a=b": "output_dir=a=b: brackets and quotation marks must match, and a value with other characters of "
    "special meaning is quoted twice: \"output_dir='a=b'\"",
    "-m seed=1,2": "'-m seed=1,2' is one argument, because of the quotes: write 2 arguments, -m seed=1,2",
}


@pytest.mark.parametrize("argument", EXPLANATIONS)
def test_each_mistake_has_its_explanation(argument: str) -> None:
    with pytest.raises(JobError) as caught:
        parse_overrides([argument])
    assert str(caught.value) == EXPLANATIONS[argument]


def test_what_the_explanations_propose_is_valid() -> None:
    parse_overrides(["variant=pytorch_gather", "variant=a,b", "variant=triton_tp", "tokens=64", "output_dir='a=b'"])


def test_all_mistakes_come_at_once() -> None:
    with pytest.raises(JobError) as caught:
        parse_overrides(["tokens=64", "lst", "tokens==64"])
    assert str(caught.value).splitlines() == [EXPLANATIONS["lst"], EXPLANATIONS["tokens==64"]]
