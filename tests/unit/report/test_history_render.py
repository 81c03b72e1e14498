"""`report.py history`: the text, Markdown and CSV of given series."""

import datetime

import pytest

from tpbench.report.analysis.metrics import metric
from tpbench.report.compare.uncertainty import Observation
from tpbench.report.history import render
from tpbench.report.history.change_points import ChangePoint
from tpbench.report.history.series import Series

START = datetime.datetime(2026, 11, 20, 12, tzinfo=datetime.UTC)
TIME = metric("time_ms")


def series(name, logs, changes=(), failure=None, **stacks):
    """Return a series with a row each day. A keyword has a column's values, one for each row."""
    rows = [
        {"row_id": f"{name}{at}", "started_at": START + datetime.timedelta(days=at), "git_commit": "a" * 40}
        | {column: values[at] for column, values in stacks.items()}
        for at in range(len(logs))
    ]
    return Series(name, rows, [Observation(log, 1e-4, True) for log in logs], changes, failure)


@pytest.mark.parametrize(
    ("name", "ratios", "worse"),
    [
        ("time_ms", [], False),
        ("time_ms", [1.1], True),
        ("time_ms", [0.9], False),
        ("time_ms", [1.5, 0.9], False),  # the newest change decides
        ("time_ms", [0.5, 1.1], True),
        ("gb_per_s", [1.1], False),
        ("gb_per_s", [0.9], True),
        ("floor_ms", [1.1], False),  # neither direction is worse
    ],
)
def test_the_newest_change_decides_if_a_cell_is_worse(name, ratios, worse):
    changes = [ChangePoint(at, ratio, 0.01) for at, ratio in enumerate(ratios, start=1)]
    assert render.is_worse(series("a", [0.0] * 4, changes), metric(name)) is worse


def two_levels():
    """Return a cell that goes from 1 ms to 2 ms with a commit, and then to 1 ms with nothing that rows record."""
    log_2 = 0.6931471805599453
    return series(
        "slow",
        [0.0, 0.0, log_2, log_2, 0.0],
        [ChangePoint(2, 2.0, 0.00123), ChangePoint(4, 0.5, 0.04)],
        git_commit=["a" * 40, "a" * 40, "b" * 40, "b" * 40, "b" * 40],
        git_dirty=[False, False, True, True, True],
        kernels_version=["3e684047"] * 5,
        torch_version=["2.11.0"] * 5,
    )


def test_the_tables_say_when_and_from_what_to_what_a_level_changed():
    failure = {"started_at": None, "status": "oom", "reason": "rank 0 ran out of memory"}
    quiet = series("quiet", [0.0, 0.0], failure=failure)
    lines = render.markdown([two_levels(), quiet], TIME, 0.025, False).splitlines()
    assert lines[0] == "time_ms of 2 cells in 7 rows: 1 changed, 1 fails now"
    assert [line for line in lines if line.startswith("| ")] == [
        "| cell | first row after | ratio | before | after | p | what differs |",
        "| :--- | :--- | ---: | ---: | ---: | ---: | :--- |",
        "| slow | 2026-11-22 12:00 | 2.000 | 1.000 ms | 2.000 ms | 0.0012 | "
        "git_commit aaaaaaaa to bbbbbbbb; git_dirty false to true |",
        "| slow | 2026-11-24 12:00 | 0.500 | 2.000 ms | 1.000 ms | 0.04 | nothing that rows record |",
        "| cell | status | first failure |",
        "| :--- | :--- | :--- |",
        "| quiet | oom | -: rank 0 ran out of memory |",
        "| cell | until | commit | kernels | torch | triton | driver | rows | level |",
        "| :--- | :--- | :--- | :--- | :--- | :--- | :--- | ---: | ---: |",
        "| slow | 2026-11-21 12:00 | aaaaaaaa | 3e684047 | 2.11.0 | - | - | 2 | 1.000 ms |",
        "| slow | 2026-11-24 12:00 | bbbbbbbb and changes | 3e684047 | 2.11.0 | - | - | 3 | 1.587 ms |",
        "| quiet | 2026-11-21 12:00 | aaaaaaaa | - | - | - | - | 2 | 1.000 ms |",
    ]


def test_text_has_no_table_without_lines():
    text = render.text([series("quiet", [0.0, 0.0])], TIME, 0.025, False)
    assert text.startswith("time_ms of 1 cell in 2 rows: 0 changed, 0 fail now\n\nLevels by commit")
    assert "differs by more than 2.5%, and a t test of the logarithms has p < 0.05 after" in text
    assert "has a false alarm with a chance of at most 5%" in text
    assert text.endswith("A level is the geometric mean of its rows.\n")


def test_an_edited_file_begins_a_level():
    edited = series(
        "my_loss.py:fast_tp",
        [0.0, 0.0, 1.0],
        [ChangePoint(2, 2.7, 0.01)],
        kernels_version=["3e684047"] * 3,
        variant_version=["0123456789ab"] * 2 + ["ba9876543210"],
    )
    lines = render.markdown([edited], TIME, 0.02, False).splitlines()
    assert sum("| 3e684047, file 01234567 |" in line for line in lines) == 1
    assert sum("| 3e684047, file ba987654 |" in line for line in lines) == 1
    assert sum("| variant_version 01234567 to ba987654 |" in line for line in lines) == 1


def test_csv_has_a_line_for_each_period_with_the_change_in_its_first_row():
    at_a_period = series(
        "a", [0.0, 0.0, 1.0], [ChangePoint(2, 2.5, 0.01)], git_commit=["a" * 40] * 2 + ["b" * 40], host=["h", "h", "g"]
    )
    within_a_period = series("b", [0.0, 0.0], [ChangePoint(1, 0.5, 0.02)])
    never = series("c", [0.0])
    lines = render.comma_separated([at_a_period, within_a_period, never], TIME, 0.02, False).splitlines()
    assert lines[0] == (
        "cell,started_at,git_commit,git_dirty,kernels_version,variant_version,tpbench_version,torch_version,triton_version,"
        "driver_version,cuda_version,nccl_version,python_version,package_versions,host,rows,level time_ms,"
        "ratio of change,p"
    )
    day = "2026-11-{} 12:00:00+00:00"
    assert lines[1:] == [
        f"a,{day.format(20)},{'a' * 40},,,,,,,,,,,,h,2,1.0,,",
        f"a,{day.format(22)},{'b' * 40},,,,,,,,,,,,g,1,2.718281828459045,2.5,0.01",
        f"b,{day.format(20)},{'a' * 40},,,,,,,,,,,,,2,1.0,0.5,0.02",
        f"c,{day.format(20)},{'a' * 40},,,,,,,,,,,,,1,1.0,,",
    ]


@pytest.mark.parametrize(("cells", "all_cells", "levels"), [(39, False, 40), (40, False, 1), (40, True, 41)])
def test_many_levels_are_shown_only_of_cells_that_changed(cells, all_cells, levels):
    """At most 40 lines of levels are shown of cells that did not change."""
    slow = series("slow", [0.0, 1.0], [ChangePoint(1, 2.7, 0.01)])
    quiet = [series(f"quiet{at}", [0.0]) for at in range(cells)]
    text = render.text([slow, *quiet], TIME, 0.02, all_cells)
    _, _, table = text.partition("Levels by commit and software\n")
    shown, _, _ = table.partition("\n\n")
    assert sum("aaaaaaaa" in line for line in shown.splitlines()) == levels
    assert ("40 cells did not change: --all lists their levels, too." in text) == (levels == 1)
