"""Sentences and keys of a report that depend on several rows: mixed provenance, repeated rows, unpaired sides."""

import pytest
from tpbench.report.tables.pivot_report import _with_interval

from tpbench.report import repeat_command
from tpbench.report.analysis.agreement import mixing_note
from tpbench.report.analysis.grid import arrange_rows
from tpbench.report.analysis.ratios import Ratio
from tpbench.report.compare.pairs import CellPair
from tpbench.report.compare.unpaired import explain_unpaired
from tpbench.settings import JobError


@pytest.fixture
def grid(frame):
    """Return a function that returns the only grid of all added rows."""

    def grid(**options):
        (found,) = arrange_rows(frame(), **options).grids
        return found

    return grid


def test_a_note_counts_what_rows_mix_and_the_problems_that_compare_it(add, grid):
    add("triton_tp", 1.0, vocab=1, host="b", git_commit="1")
    add("quack", 1.0, vocab=1, host="a", git_commit="1")
    add("triton_tp", 1.0, vocab=2, host="a", git_commit="2")
    add("quack", 1.0, vocab=2, host="a", git_commit="2")
    mixed = "mixes 2 hosts (a, b) and 2 commits; in 1 of 2 problems the compared rows differ in one of them"
    assert mixing_note(grid()) == f"This table {mixed}"
    assert mixing_note(grid(), "This section") == f"This section {mixed}"


def test_a_note_says_that_no_compared_rows_differ(add, grid):
    for vocab, commit in ((1, "1"), (2, "2"), (3, "3")):
        add("triton_tp", 1.0, vocab=vocab, git_commit=commit)
    assert mixing_note(grid()) == "This table mixes 3 commits; no problem compares rows that differ in them"


def test_rows_of_one_provenance_need_no_note(add, grid):
    add("triton_tp", 1.0, host="a")
    add("quack", 1.0, host=None)
    assert mixing_note(grid()) == ""


def test_equal_rows_are_counted_from_the_newest(add, grid):
    for time_ms in (1.0, 2.0, 3.0):
        add("triton_tp", time_ms)
    add("quack", 9.0)
    found = grid(all_rows=True, columns=["time_ms"])
    assert found.key_names[-1] == "run" and found.tie_breaking_keys == frozenset({"run"})
    times = {(cell.column, cell.key[-1]): cell.record["time_ms"] for cell in found.cells()}
    assert times == {("triton_tp", 1): 3.0, ("triton_tp", 2): 2.0, ("triton_tp", 3): 1.0, ("quack", 1): 9.0}


def test_rows_of_one_cell_are_told_apart_by_their_jobs(add, grid):
    """Fields in which the jobs of one cell agree, and fields that are no part of a cell, are no keys."""
    for budget in (1.0, 2.0):
        add("triton_tp", budget, job={"time_budget_s": budget, "rounds": 3, "output_dir": f"folder{budget}"})
    found = grid(all_rows=True)
    assert found.tie_breaking_keys == frozenset({"job time_budget_s"})
    assert sorted(cell.key[-1] for cell in found.cells()) == [1.0, 2.0]


def test_five_kinds_of_a_side_are_four_and_one_more():
    def one_sided(names, at):
        rows = [{"workload": "w", "variant": name, "hardware": "GPU", "status": "ok"} for name in names]
        sides = [((row,), ()) if at == "before" else ((), (row,)) for row in rows]
        identities = [(("variant", name), ("tokens", at)) for name in names]
        return [CellPair(name, key, *side) for name, key, side in zip(names, identities, sides, strict=True)]

    lines = explain_unpaired([*one_sided("aabcde", "before"), *one_sided("wxyz", "after")]).splitlines()
    assert lines[1] == "  before: 6 cells; 6 w; 2 a, 1 b, 1 c, 1 d, 1 more; 6 GPU; 6 ok"
    assert lines[2] == "  after: 4 cells; 4 w; 1 w, 1 x, 1 y, 1 z; 4 GPU; 4 ok"
    assert lines[3] == "  the two most similar cells (a and w) differ in variant (a, w), tokens (before, after)"
    assert len(explain_unpaired(one_sided("a", "before")).splitlines()) == 3


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"), (True, "true"), (False, "false"), (0, "0"), (1, "1"), (2.5, "2.5"),
        ("a/b.c:d+e-f", "a/b.c:d+e-f"), ("", "''"), ("a b", "'a b'"), ("a'b", "'a\\'b'"), ("a\\'b", "'a\\\\\\'b'"),
        ("a\\", "'a\\\\'"),
        ("a\\b", "'a\\b'"),
    ],
)  # fmt: skip
def test_values_in_the_grammar_of_a_command_line(value, text):
    assert repeat_command._text("name", value) == text


@pytest.mark.parametrize(
    ("name", "is_file"),
    [
        ("my_loss.py:fast_tp", True), ("a.b-c.py:_f", True), ("triton_tp", False), ("x/my_loss.py:f", False),
        ("-x.py:f", False), ("my_loss.py:1", False), ("my_loss.py:f g", False), (None, False), (7, False),
    ],
)  # fmt: skip
def test_names_of_variants_in_files(name, is_file):
    assert repeat_command.is_from_file(name) is is_file


def test_a_model_is_named_by_the_list_of_defaults(tmp_path):
    shape = tmp_path / "shape.yaml"
    shape.write_text("defaults: [_self_, {override /measure: quick}]\n")
    assert repeat_command._model_values(shape) == {}
    shape.write_text("")
    assert repeat_command._model_values(shape) == {}


@pytest.mark.parametrize("columns", [{"job": "{}", "environment": "[]"}, {"job": "7", "environment": "{}"}])
def test_a_job_and_an_environment_are_mappings(columns):
    with pytest.raises(JobError, match="the row does not have its job"):
        repeat_command.row_command(columns)


@pytest.mark.parametrize(
    ("distance", "text"),
    [
        (0.5, "2.00x, 1.50 to 2.50"),
        (0.02, "2.000x, 1.980 to 2.020"),
        (0.002, "2.0000x, 1.9980 to 2.0020"),
        (1e-6, "2.0000x, 2.0000 to 2.0000"),
        (0.0, "2.00x, 2.00 to 2.00"),
    ],
)
def test_a_ratio_has_as_many_digits_as_its_interval_needs(distance, text):
    assert _with_interval(Ratio(2.0, 2.0 - distance, 2.0 + distance)) == text
