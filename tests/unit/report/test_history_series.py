"""`report.py history`: which rows of a frame are the series of a cell."""

import pytest

from tests.unit.report.conftest import CPU
from tpbench.report.analysis.metrics import metric
from tpbench.report.command import main
from tpbench.report.history.series import all_series

OTHER = {"gpu_name": "NVIDIA B200"}


@pytest.fixture
def series(frame):
    """Return a function that returns the series of all added rows."""
    return lambda: all_series(frame(), metric("time_ms"), 0.02)


def times(series):
    return [row["time_ms"] for row in series.rows]


def test_rows_of_a_cell_are_in_time_order_and_hardware_divides_them(add, series):
    for time_ms, changes in ((1.0, {}), (5.0, OTHER), (1.1, {}), (5.1, OTHER)):
        add("triton_tp", time_ms, **changes)
    found = {each.name: times(each) for each in series()}
    assert list(found.values()) == [[1.0, 1.1], [5.0, 5.1]]
    assert [name.rpartition(" on ")[2] for name in found] == ["NVIDIA H200", "NVIDIA B200"]


def test_one_kind_of_hardware_is_not_named(add, series):
    add("triton_tp", 1.0)
    add("quack", 2.0)
    assert sorted(each.name.split()[0] for each in series()) == ["quack", "triton_tp"]
    assert not any(" on " in each.name for each in series())


@pytest.mark.parametrize(
    "changes",
    [{"beside": "another job"}, {"interpreted": True}, {"warmed_up": False}, {"time_ms": None}, {"time_ms": 0.0}],
)
def test_rows_that_are_no_undisturbed_measurement_are_left_out(add, series, changes):
    add("triton_tp", 1.0)
    add("triton_tp", **{"time_ms": 9.0} | changes)
    (found,) = series()
    assert times(found) == [1.0] and found.failure is None


def test_a_cell_without_a_measurement_has_no_series(add, series):
    add("triton_tp", status="error", reason="x")
    assert series() == []


@pytest.mark.parametrize("status", ["oom", "wrong", "timeout", "error", "skipped"])
def test_the_newest_row_may_be_a_failure(add, series, status):
    """A skipped row is no failure."""
    add("triton_tp", 1.0, torch_version="2.11.0")
    add("triton_tp", status=status, reason="x", torch_version="2.99.0")
    (found,) = series()
    assert (found.failure is None) == (status == "skipped")


def test_a_failure_before_a_measurement_is_over(add, series):
    add("triton_tp", status="error", reason="x", torch_version="2.11.0")
    add("triton_tp", 1.0, torch_version="2.99.0")
    (found,) = series()
    assert found.failure is None


def test_all_cells_together_are_corrected_for(add, series):
    """A change is half as significant if twice as many points were tested."""
    for time_ms in (1.0, 1.0, 1.5, 1.5):
        add("triton_tp", time_ms)
    ((alone,),) = [each.changes for each in series()]
    for _ in range(4):
        add("quack", 1.0)
    ((beside,), ()) = [each.changes for each in series()]
    assert beside.at == alone.at == 2 and beside.ratio == pytest.approx(1.5)
    assert beside.p > alone.p


def test_the_command_has_a_threshold_and_writes_a_file(add, tmp_path, capsys):
    for time_ms in (*[1.0] * 4, *[1.5] * 4):
        add("triton_tp", time_ms)
    rows, out = str(tmp_path), tmp_path / "history.txt"
    assert main(["history", rows, "-o", str(out)]) == main(["history", rows]) == 1
    assert capsys.readouterr().out == out.read_text() and "differs by more than 2%" in out.read_text()
    assert main(["history", rows, "--threshold", "0.6"]) == 0
    assert ": 0 changed" in capsys.readouterr().out
    assert main(["history", rows, "-o", str(tmp_path / "no" / "folder")]) == 2
    assert main(["history", rows, "--metric", "time"]) == 2
    assert "no metric is called time" in capsys.readouterr().err


def test_cells_on_a_processor_have_a_history(add, series):
    for _ in range(2):
        add("triton_tp", 1.0, **CPU)
    (found,) = series()
    assert times(found) == [1.0, 1.0]
