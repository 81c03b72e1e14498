"""Cells of a pivot table: which records have a value, a mark and a ratio."""

import pytest
from tpbench.report.tables.pivot_report import PivotCell, PivotLine, PivotTable

from tpbench.report.analysis.metrics import metric
from tpbench.report.pivot import _cell, _with_floor


def record(**fields):
    usual = {
        "row_id": "r", "status": "ok", "reason": None, "time_ms": 2.0, "loss_error": 3.0, "interpreted": False,
        "warmed_up": True,
    }  # fmt: skip
    return usual | fields


@pytest.mark.parametrize(
    ("name", "status", "value"),
    [
        ("time_ms", "ok", 2.0), ("time_ms", "wrong", None), ("time_ms", "oom", None),
        ("loss_error", "ok", 3.0), ("loss_error", "wrong", 3.0), ("loss_error", "oom", None),
    ],
)  # fmt: skip
def test_only_an_error_is_shown_of_a_wrong_row(name, status, value):
    assert metric("loss_error").shown_if_wrong and not metric("time_ms").shown_if_wrong
    found = _cell(record(status=status, interpreted=True), metric(name))
    assert found.value == value and found.mark == ("*" if value else "")
    assert _cell(record(status=status), metric(name)).mark == ""


def test_a_value_may_be_missing_and_a_reason_is_printable():
    found = _cell(record(time_ms=None, reason="a\x1b[31m\nb"), metric("time_ms"))
    assert found.value is None and found.reason == "a[31m b" and found.row_id == "r"


def test_the_floor_is_that_of_the_fastest_row():
    cells = (PivotCell("a", "ok", value=2.0, ratio=2.0), PivotCell("b", "ok", value=1.0, ratio=1.0), None)
    rows = ({"row_id": "a", "floor_ms": 0.1}, {"row_id": "b", "floor_ms": 0.2}, None)
    table = PivotTable("", {}, ("k",), ("x", "y", "z"), (PivotLine(("1",), cells), PivotLine(("2",), (None,) * 3)), ())

    class Row:
        def __init__(self, records):
            self.records = records

    class Grid:
        def __init__(self, *of):
            self.rows = [Row(each) for each in of]

    found = _with_floor(table, Grid(rows, (None,) * 3))
    assert found.columns == ("x", "y", "z", "floor")
    assert found.lines[0].cells[3] == PivotCell("b", "ok", value=0.2) and found.lines[1].cells[3] is None
