"""Records and grids: what splits a problem, which rows are of one cell, and which marks a row gets."""

import pytest

from tpbench.report.analysis.grid import arrange_rows, mixing_note
from tpbench.report.analysis.row_values import caveat_mark, is_measurement, marks, remark_marks


@pytest.mark.parametrize(
    ("fields", "mark", "measurement"),
    [
        ({}, "", True), ({"interpreted": True}, "*", False), ({"warmed_up": False}, "^", False),
        ({"warmed_up": None}, "", True), ({"interpreted": True, "warmed_up": False}, "*", False),
        ({"status": "wrong"}, "", False), ({"interpreted": None}, "", True),
        ({"time_ci_high_ms": 0.522, "device_ci_low_ms": 0.751}, "≠", False),
        ({"time_ci_high_ms": 0.522, "device_ci_low_ms": 0.54}, "", True), ({"device_ci_low_ms": 0.751}, "", True),
    ],
)  # fmt: skip
def test_rows_that_are_no_measurements(fields, mark, measurement):
    record = {"status": "ok", "interpreted": False, "warmed_up": True} | fields
    assert (caveat_mark(record), is_measurement(record)) == (mark, measurement)


def test_a_row_that_does_not_say_what_bounds_it_is_host_bound_by_its_clocks(add, frame):
    add("triton_tp", 1.0, device_ms=0.7)
    add("pytorch_tp_manual", 1.0, device_ms=0.9)
    add("quack", 1.0, device_ms=0.7, bound="wire")
    add("liger", 1.0)
    (grid,) = arrange_rows(frame())
    marks = {record["variant"]: remark_marks(record) for record in grid.records}
    assert marks == {"triton_tp": "†", "pytorch_tp_manual": "", "quack": "", "liger": ""}


def test_the_loop_decides_which_cell_is_host_bound_beside_its_times(add, frame):
    add("triton_tp", 1.0, device_ms=0.5, chained_ms=0.6)
    add("fast_llm", 1.0, device_ms=0.5, chained_ms=0.7)
    (grid,) = arrange_rows(frame())
    assert [marks(record, ("time_ms", "chained_ms")) for record in grid.records] == ["†", "†"]
    assert [marks(record, ("chained_ms", "device_ms")) for record in grid.records] == ["", "†"]


def test_settings_of_the_measurement_split_no_problem(add, frame):
    """The newest measurement of a cell has its place."""
    for budget in (1.0, 2.0):
        add("triton_tp", budget, job={"time_budget_s": budget})
    for time_ms in (1.0, 2.0, 3.0):
        add("quack", time_ms)
    add("quack", status="oom", job={"time_budget_s": 9})
    (found,) = arrange_rows(frame())
    assert [record["time_ms"] for record in found.records] == [2.0, 3.0]


def test_each_memory_limit_of_a_cell_has_a_line(add, frame):
    add("triton_tp", status="oom", memory_limit_gib=2.0)
    add("triton_tp", 1.0, memory_limit_gib=4.0)
    add("quack", 1.0, memory_limit_gib=139.8)
    (grid,) = arrange_rows(frame())
    assert {(record["variant"], record["memory_limit_gib"]) for record in grid.records} == {
        ("triton_tp", 2.0), ("triton_tp", 4.0), ("quack", 139.8),
    }  # fmt: skip


def test_gpus_of_one_kind_split_no_problem(add, frame):
    for limit in (79.18, 79.11):
        add("triton_tp", 1.0, memory_limit_gib=limit)
    (grid,) = arrange_rows(frame())
    assert "memory_limit_gib" not in grid.key_names


def note(frame):
    (found,) = arrange_rows(frame())
    return mixing_note(found)


def test_a_note_counts_what_rows_mix(add, frame):
    add("triton_tp", 1.0, vocab=1, host="a", git_commit="1")
    add("quack", 1.0, vocab=1, host=None, git_commit="1")
    assert note(frame) == ""
    add("liger", 1.0, vocab=1, host="b", git_commit="1")
    add("triton_tp", 1.0, vocab=2, host="a", git_commit="2")
    mixed = "mixes 2 hosts (a, b), 2 commits"
    assert note(frame) == f"This table {mixed}"
