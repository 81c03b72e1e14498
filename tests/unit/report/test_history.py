"""`tpbench history`: levels of a cell by time, a verdict on the newest one, and the exit code."""

import datetime

import numpy as np
import pytest

from tests.support import synthetic
from tests.support.commands import report as main
from tests.unit.report.conftest import CPU
from tpbench.report.analysis.row_values import metric
from tpbench.report.history import all_levels
from tpbench.results.write import write_row


def write(folder, factors, **of_last_half):
    """Write a row for each factor, a day apart, of two cells. The second cell never changes."""
    random = np.random.default_rng(5)
    for at, factor in enumerate(factors):
        later = of_last_half if at >= len(factors) // 2 else {}
        for variant, time_ms in (("triton_tp", factor), ("pytorch_gather", 1.0)):
            samples = time_ms * (1 + 0.003 * random.standard_normal(30))
            row = synthetic.cell(variant, 32768, 2, git_commit="a" * 40, samples_ms=samples, floor_ms=0.1)
            row |= {"time_ms": float(np.median(samples)), "cell": 0, "device_ms": None} | later
            moment = synthetic.START + datetime.timedelta(days=at)
            write_row({"started_at": moment, "finished_at": moment, **row}, folder, f"{variant}{at}")
    return str(folder)


def test_a_slower_level_is_named_with_its_commit_and_package(tmp_path, capsys):
    place = write(tmp_path, [1.0] * 6 + [1.2] * 6, git_commit="b" * 40, torch_version="2.99.0")
    assert main(["history", place]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("time_ms of 2 cells in 24 rows: the newest level of 1 changed, 0 fail now")
    (line,) = [line for line in printed.splitlines() if "slower" in line and "torch_version" in line]
    assert line.split()[0] == "triton_tp" and f"git_commit {'a' * 12} and {'b' * 12}" in line
    assert "2026-11-26" in line and "torch_version 2.11.0 and 2.99.0" in line
    assert main(["history", place, "--variant", "pytorch_gather"]) == 0
    assert main(["history", place, "--threshold", "0.6"]) == 0
    assert main(["history", place, "--metric", "tim"]) == 2


def test_csv_has_all_levels(tmp_path, capsys):
    place = write(tmp_path, [1.0] * 2 + [1.5] * 2, git_commit="b" * 40)
    assert main(["history", place, "--format", "csv"]) == 1
    header, *lines = capsys.readouterr().out.splitlines()
    assert header == "cell,since,commit,rows,level,ratio,p,verdict,what differs"
    assert len(lines) == 4 and sum(",slower," in line for line in lines) == 1


def test_a_screen_without_columns_and_values_beyond_any_ratio(tmp_path, capsys, monkeypatch):
    place = write(tmp_path, [1e-300, 1e300])
    monkeypatch.setenv("COLUMNS", "0")
    assert main(["history", place]) == 1 and "slower" in capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "00")
    assert main([place]) == 0 and "triton_tp" in capsys.readouterr().out


def test_a_faster_level_passes_and_a_failure_does_not(tmp_path, capsys):
    place = write(tmp_path, [1.2] * 6 + [1.0] * 6, git_commit="b" * 40)
    assert main(["history", place]) == 0
    failed = synthetic.cell("triton_tp", 32768, 2, status="error", reason="no such kernel", torch_version="2.99.0")
    moment = synthetic.START + datetime.timedelta(days=40)
    write_row({"started_at": moment, "finished_at": moment, "cell": 0, **failed}, tmp_path, "x")
    assert main(["history", place]) == 1
    assert "fails now" in (printed := capsys.readouterr().out) and "ok, then error: no such kernel" in printed


def test_the_newest_row_is_a_level_if_all_rows_have_the_same_code(tmp_path, capsys):
    assert main(["history", write(tmp_path, [1.0] * 5 + [2.0])]) == 1
    assert "nothing that rows record" in capsys.readouterr().out


def test_a_check_of_nothing_does_not_pass(tmp_path, capsys):
    """The message says why: rows that count for nothing, and samples that are too few, were "not measured twice"."""
    assert main(["history", write(tmp_path / "once", [1.0])]) == 2
    assert "no cell was measured twice\n" in capsys.readouterr().err
    assert main(["history", write(tmp_path / "beside", [1.0] * 2, beside="another sweep")]) == 2
    assert "twice (2 rows beside other jobs or without time_ms left out)" in capsys.readouterr().err
    few = write(tmp_path / "few", [1.0, 2.0], samples_ms=[2.0], time_ms=2.0)
    assert main(["history", few]) == 2
    assert "nothing was compared: too few samples to tell: measure=default" in capsys.readouterr().err


def test_the_commit_is_that_of_the_user_s_repository(tmp_path, capsys):
    place = write(tmp_path, [1.0] * 2 + [1.5] * 2, user_commit=f"{'c' * 40} and changes")
    assert main(["history", place]) == 1
    assert "cccccccc and changes" in capsys.readouterr().out


@pytest.fixture
def series(frame):
    """Return a function that returns the series of all added rows."""
    return lambda: all_levels(frame(), metric("time_ms"))


def times(series):
    return [[row["time_ms"] for row in level] for level in series[1]]


def test_rows_of_a_cell_are_in_time_order_and_hardware_divides_them(add, series):
    other = {"gpu_name": "NVIDIA B200"}
    for time_ms, changes in ((1.0, {}), (5.0, other), (1.1, {"host": "b"}), (5.1, other), (1.2, {"host": "b"})):
        add("triton_tp", time_ms, **changes)
    found = {each[0].rpartition(" on ")[2]: times(each) for each in series()}
    assert found == {"NVIDIA H200": [[1.0], [1.1, 1.2]], "NVIDIA B200": [[5.0], [5.1]]}


@pytest.mark.parametrize(
    "changes",
    [{"beside": "another job"}, {"interpreted": True}, {"warmed_up": False}, {"time_ms": None}, {"time_ms": 0.0}],
)
def test_rows_that_are_no_undisturbed_measurement_are_left_out(add, series, changes):
    add("triton_tp", 1.0, **CPU)
    add("triton_tp", **{"time_ms": 9.0} | CPU | changes)
    (found,) = series()
    assert times(found) == [[1.0]] and " on " not in found[0]
