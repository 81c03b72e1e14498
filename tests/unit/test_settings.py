"""Suggestions for names that do not exist."""

import pytest

from tpbench.settings import nearest, unknown


@pytest.mark.parametrize(
    ("name", "valid", "suggestion"),
    [
        ("gpu", ("auto", "cuda", "cpu"), ", did you mean cuda?"),  # and not cpu, which is spelled similarly
        ("GPU", ("auto", "cuda", "cpu"), ", did you mean cuda?"),
        ("gpu", ("auto", "cpu"), ", did you mean cpu?"),
        ("bf16", ("bfloat16", "float16", "float32"), ", did you mean bfloat16?"),
        ("half", ("bfloat16", "float16", "float32"), ", did you mean float16?"),
        ("fast", ("default", "quick", "thorough"), ""),
        ("measure", ("heads", "seed"), ""),
        ("quik", ("default", "quick", "thorough"), ", did you mean quick?"),
        ("slurm", ("basic", "torchrun_slurm"), ", did you mean torchrun_slurm?"),  # a whole word of the name
        ("9", ("8", "16"), ""),
    ],
)
def test_only_a_close_name_is_suggested(name, valid, suggestion):
    assert nearest(name, valid) == suggestion


def test_the_valid_names_are_listed():
    assert unknown("measure", "fast", ("quick", "default")) == "no measure is called fast (valid: default, quick)"


def test_a_long_list_is_named_and_three_names_are_suggested():
    columns = ["time_ms", "time_min_ms", "time_p5_ms", *(f"other_{index}" for index in range(187))]
    message = unknown("column", "time_mss", columns, "outputs/SCHEMA.md")
    assert message == (
        "no column is called time_mss, did you mean time_ms, time_p5_ms or time_min_ms? (all 190: outputs/SCHEMA.md)"
    )
    assert unknown("column", "x", columns, "outputs/SCHEMA.md") == "no column is called x (all 190: outputs/SCHEMA.md)"
