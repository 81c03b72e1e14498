"""`report.py history`: it finds a change of 3% with its commit, and is silent about the same rows in another order."""

import datetime

import numpy as np
import pytest
from scipy import stats

from tests.support import synthetic
from tpbench.report.command import main
from tpbench.report.compare.uncertainty import Observation
from tpbench.report.history.change_points import ALPHA, change_points, run_scatter
from tpbench.results.write import write_row

CELLS, ROWS = 8, 20


def observed(logs):
    """Return rows whose samples let assume the least scatter between runs."""
    return [Observation(float(log), 0.01**2, True) for log in logs]


def history(logs, threshold=0.02):
    """Return the changes of each cell, given an array of (cells, rows) of logarithms."""
    series = [observed(row) for row in logs]
    factor = run_scatter(series)
    return [change_points(row, threshold, logs.size - len(logs), factor) for row in series]


def stepped(random, step=0.03, scatter=0.007):
    """Return logarithms whose level rises in the middle, in half of the cells."""
    logs = random.normal(0, scatter, (CELLS, ROWS))
    logs[::2, ROWS // 2 :] += np.log1p(step)
    return logs


def test_a_change_of_three_percent_is_found_where_it_is():
    random = np.random.default_rng(0)
    found = missed = false = 0
    for _ in range(50):
        for cell, changes in enumerate(history(stepped(random))):
            near = [each for each in changes if abs(each.at - ROWS // 2) <= 1]
            found += cell % 2 == 0 and len(near) == 1
            missed += cell % 2 == 0 and not near
            false += len(changes) - len(near)
            assert all(1.015 < each.ratio < 1.045 and each.p < ALPHA for each in near)
    assert found >= 0.95 * (found + missed) and false <= 3


def test_the_same_rows_in_another_order_are_silent():
    random = np.random.default_rng(1)
    histories = [random.permuted(stepped(random), axis=1) for _ in range(100)]
    assert sum(any(history(logs)) for logs in histories) <= 100 * ALPHA


@pytest.mark.parametrize("scatter", [0.002, 0.01, 0.05])
def test_a_history_without_changes_is_silent(scatter):
    random = np.random.default_rng(2)
    alarms = sum(any(history(random.normal(0, scatter, (CELLS, ROWS)), threshold=0)) for _ in range(200))
    assert alarms <= 200 * ALPHA + 6  # two standard errors


def test_two_changes_of_one_cell_are_two_levels():
    logs = np.concatenate([np.zeros(8), np.full(8, 0.1), np.full(8, 0.05)]) + np.random.default_rng(3).normal(
        0, 0.005, 24
    )
    (changes,) = history(logs[None])
    assert [each.at for each in changes] == [8, 16]
    assert changes[0].ratio == pytest.approx(np.exp(0.1), rel=0.01)
    assert changes[1].ratio == pytest.approx(np.exp(-0.05), rel=0.01)


def test_no_rows_to_compare_let_assume_the_least_scatter():
    assert run_scatter([]) == run_scatter([observed([1.0])]) == 1.0


def test_the_scatter_of_runs_is_the_median_of_their_squared_differences():
    """The squared differences are 8, 2 and 18 times the variance of 1e-4 of each row, so their median ratio is 4."""
    series = [observed(np.sqrt(1e-4) * np.cumsum([0, np.sqrt(8), np.sqrt(2)])), observed([0, 0.01 * np.sqrt(18)])]
    assert run_scatter(series) == pytest.approx(4 / stats.chi2.median(1))
    assert run_scatter([observed([0.5, 0.5])]) == 1.0  # never below the assumed scatter


def test_the_p_value_is_that_of_a_moderated_t_test():
    """Four prior degrees of freedom stand for the assumed variance: 4 + 6 rows - 2 levels = 8."""
    logs = [-0.01, 0.0, 0.01, 0.09, 0.1, 0.11]
    (change,) = change_points(observed(logs), 0.02, tests=5, factor=2.0)
    error = np.sqrt((4 * 2.0 * 1e-4 + 4 * 1e-4) / 8 * (1 / 3 + 1 / 3))
    assert change.at == 3 and change.ratio == pytest.approx(np.exp(0.1))
    assert change.p == pytest.approx(5 * 2 * stats.t.sf(0.1 / error, 8))


def test_a_change_among_two_rows_is_found():
    assert [each.at for each in change_points(observed([0.0, 1.0]), 0.02, tests=1, factor=1.0)] == [1]
    assert change_points(observed([0.0]), 0.02, tests=1, factor=1.0) == []


def test_changes_on_both_sides_of_a_change_are_found():
    logs = np.repeat([0.0, 0.3, 1.5, 1.8, 1.6], 6)
    changes = change_points(observed(logs), 0.02, tests=29, factor=1.0)
    assert [each.at for each in changes] == [6, 12, 18, 24]
    assert np.log([each.ratio for each in changes]) == pytest.approx([0.3, 1.2, 0.3, -0.2])


def test_a_change_must_exceed_the_threshold():
    logs = observed([0.0] * 4 + [1.0] * 4)
    assert change_points(logs, np.expm1(1.0), tests=7, factor=1.0) == []
    assert change_points(logs, np.expm1(0.999), tests=7, factor=1.0)


def test_a_change_below_the_threshold_does_not_count():
    logs = np.concatenate([np.zeros(10), np.full(10, 0.01)]) + np.random.default_rng(4).normal(0, 1e-4, 20)
    assert history(logs[None], threshold=0.02) == [[]]


def write(folder, factors, **of_last_half):
    """Write a row for each factor, a day apart, of two cells. The second cell never changes."""
    random = np.random.default_rng(5)
    for at, factor in enumerate(factors):
        later = of_last_half if at >= len(factors) // 2 else {}
        for variant, own in (("triton_tp", factor), ("pytorch_gather", 1.0)):
            row = synthetic.cell(variant, 32768, 2, git_commit="a" * 40)
            row |= {"time_ms": own * float(np.exp(random.normal(0, 0.003))), "cell": 0} | later
            moment = synthetic.START + datetime.timedelta(days=at)
            write_row({"started_at": moment, "finished_at": moment, **row}, folder, f"{variant}{at}")
    return str(folder)


def test_the_report_names_the_commit_and_the_package(tmp_path, capsys):
    place = write(tmp_path, [1.0] * 6 + [1.05] * 6, git_commit="b" * 40, torch_version="2.99.0")
    assert main(["history", place]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("time_ms of 2 cells in 24 rows: 1 changed, 0 fail now")
    (line,) = [line for line in printed.splitlines() if "torch_version" in line]
    assert line.split()[0] == "triton_tp" and "git_commit aaaaaaaa to bbbbbbbb" in line and "to 2.99.0" in line
    assert "2026-11-26" in line
    assert main(["history", place, "--variant", "pytorch_gather"]) == 0
    assert main(["history", place, "--format", "csv"]) == 1
    assert capsys.readouterr().out.count("\n") >= 5


def test_a_faster_level_passes_and_a_failure_does_not(tmp_path, capsys):
    place = write(tmp_path, [1.05] * 6 + [1.0] * 6)
    assert main(["history", place]) == 0
    failed = synthetic.cell("triton_tp", 32768, 2, status="error", reason="no such kernel")
    moment = synthetic.START + datetime.timedelta(days=40)
    write_row(
        {"started_at": moment, "finished_at": moment, "cell": 0, **failed, "torch_version": "2.99.0"}, tmp_path, "x"
    )
    assert main(["history", place]) == 1
    assert "no such kernel" in capsys.readouterr().out


def test_a_check_of_nothing_does_not_pass(tmp_path, capsys):
    place = write(tmp_path, [1.0])
    assert main(["history", place]) == 2
    assert "no cell was measured twice" in capsys.readouterr().err
