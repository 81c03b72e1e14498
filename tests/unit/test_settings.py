"""Suggestions for names that do not exist."""

from dataclasses import dataclass
from typing import Literal

import pytest

from tpbench.settings import JobError, parse, setting
from tpbench.suggestions import memory_text, nearest, printable, unknown


@pytest.mark.parametrize(
    ("name", "valid", "suggestion"),
    [
        ("gpu", ("auto", "cuda", "cpu"), ", did you mean cuda?"),  # and not cpu, which is spelled similarly
        ("bf16", ("bfloat16", "float16", "float32"), ", did you mean bfloat16?"),
        ("half", ("bfloat16", "float16", "float32"), ", did you mean float16?"),
        ("fast", ("default", "quick", "thorough"), ""),
        ("measure", ("heads", "seed"), ""),
        ("quik", ("default", "quick", "thorough"), ", did you mean quick?"),
        ("slurm", ("basic", "torchrun_slurm"), ", did you mean torchrun_slurm?"),  # a whole word of the name
        ("NVIDIA H100", ("NVIDIA H100 80GB HBM3", "NVIDIA H200"), ", did you mean NVIDIA H100 80GB HBM3?"),
        ("9", ("8", "16"), ""),
    ],
)
def test_only_a_close_name_is_suggested(name, valid, suggestion):
    assert nearest(name, valid) == suggestion


def test_a_long_list_is_named_and_three_names_are_suggested():
    columns = ["time_ms", "time_min_ms", "time_p5_ms", *(f"other_{index}" for index in range(187))]
    message = unknown("column", "time_mss", columns, "outputs/SCHEMA.md")
    assert message == (
        "no column is called time_mss, did you mean time_ms, time_p5_ms or time_min_ms? (all 190: outputs/SCHEMA.md)"
    )
    assert unknown("size", 7, ("auto", "16", "9", "4096", "32")) == "no size is called 7 (valid: 9, 16, 32, 4096, auto)"


@dataclass(frozen=True)
class Settings:
    """One field of each kind."""

    name: str = setting(help="a name")
    count: int = setting(3, help="a number of things", low=1)
    share: float = setting(0.5, help="a share", low=0.0, high=1.0)
    most: float | None = setting(None, help="a limit", high=10.0)
    flag: bool = setting(False, help="a flag")
    way: Literal["first", "second", 2] = setting("first", help="a way")


def parsed(**values: object) -> Settings:
    made: Settings = parse(Settings, {"name": "x", **values})
    return made


def test_defaults_are_kept_and_texts_are_converted():
    assert parsed() == Settings("x")
    assert parsed(name=7, count="4", share="1", most="2.5", flag="TRUE", way="2") == Settings("7", 4, 1.0, 2.5, True, 2)
    assert type(parsed(share="1").share) is float and type(parsed(count=4.0).count) is int
    assert parsed(flag=False) == parsed(flag="False") == Settings("x")
    assert [parsed(count=text).count for text in ("128k", "2K", "1M")] == [131072, 2048, 2**20]


@pytest.mark.parametrize("none", [None, "null", "none", "None"])
def test_only_an_optional_field_can_be_null(none):
    assert parsed(most=none).most is None
    said = r"count(=\w+ must be| has no value: write count=VALUE,) a whole number \(a number of things\)"
    with pytest.raises(JobError, match=said):
        parsed(count=none)
    assert parsed(name=none).name == (none or "null")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"count": 0}, "count=0 must be at least 1 (a number of things)"),
        ({"count": 1.5}, "count=1.5 must be a whole number (a number of things)"),
        ({"count": "9" * 20}, "count=99999999999999999999 must be below 2^53 (a number of things)"),
        ({"count": True}, "count=true must be a whole number (a number of things)"),
        ({"share": -0.1}, "share=-0.1 must be at least 0.0 and at most 1.0 (a share)"),
        ({"share": 1.1}, "share=1.1 must be at least 0.0 and at most 1.0 (a share)"),
        ({"share": "nan"}, "share=nan must be a number (a share)"),
        ({"most": 11}, "most=11 must be at most 10.0 (a limit)"),
        ({"flag": "yes"}, "flag=yes must be true or false"),
        ({"flag": 1}, "flag=1 must be true or false"),
        ({"way": "secnd"}, "way=secnd does not exist, did you mean second? (valid: first, second, 2)"),
    ],
)
def test_a_wrong_value_gets_one_line(values, said):
    with pytest.raises(JobError) as caught:
        parsed(**values)
    assert str(caught.value) == said


def test_a_missing_field_is_described_and_all_mistakes_are_told():
    with pytest.raises(JobError) as caught:
        parse(Settings, {"count": 0, "flag": 2})
    assert str(caught.value).splitlines() == [
        "name is missing (a name)", "count=0 must be at least 1 (a number of things)", "flag=2 must be true or false",
    ]  # fmt: skip


def test_memory_is_written_in_a_unit_of_which_it_has_one():
    assert [memory_text(gib) for gib in (2.5, 0.5, 1.91e-05, 0.0)] == ["2.5 GiB", "512 MiB", "20 KiB", "0 KiB"]


def test_a_long_text_keeps_its_start_and_more_of_its_end():
    assert printable("x" * 200) == "x" * 200
    cut = printable("a" * 100 + "b" * 101)
    assert cut == "a" * 66 + " ... " + "a" * 33 + "b" * 101
    assert printable("ab" * 20, 30) == ("ab" * 20)[:10] + " ... " + ("ab" * 20)[-20:]
    huge = printable("a" * 1000 + "b" * 1001)  # cut before it is looked at
    assert huge == "a" * 66 + " ... " + "b" * 134
    assert printable("\x1b[31mred\u202e \ud800\n\tend") == "[31mred end"
