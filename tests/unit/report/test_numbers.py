"""Numbers of a report: their digits, their ratios, and the limits of what is compared."""

import math

import numpy as np
import pytest
from tpbench.report.conclusions import answers

from tpbench.report.analysis.agreement import _far_apart, differing_provenance
from tpbench.report.analysis.metrics import Metric, metric, number, ratio_text
from tpbench.report.analysis.ratios import Ratio, abba_ratio, averages_below_interval, interleaved_ratio
from tpbench.report.analysis.records import caveat_mark, is_measurement, job_fields, sort_key, value_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.000"), (0.09999, "0.1"), (0.1, "0.100"), (-0.1, "-0.100"), (0.012345, "0.0123"), (9.9994, "9.999"),
        (10, "10.00"), (-10, "-10.00"), (99.994, "99.99"), (100, "100.0"), (999.94, "999.9"), (1000, "1000"),
        (12345.6, "12346"), (-1000, "-1000"), (math.inf, "inf"), (math.nan, "nan"), (1e-9, "1e-09"),
    ],
)  # fmt: skip
def test_about_four_digits(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("ratio", "text"),
    [(0.5, "0.50x"), (9.99, "9.99x"), (10, "10.0x"), (99.9, "99.9x"), (100, "100x"), (999, "999x"), (1000, ">999x")],
)
def test_ratios_as_text(ratio, text):
    assert ratio_text(ratio) == text


def of(better):
    return Metric("m", "", "GiB", better, "", False)


def test_a_ratio_is_that_to_the_best_sound_value():
    values = [2.0, 4.0, 0.0, -1.0, math.inf, math.nan]
    assert of(-1).ratios(values) == [1.0, 2.0, None, None, None, None]
    assert of(1).ratios(values) == [2.0, 1.0, None, None, None, None]
    assert of(0).ratios(values) == [None] * 6 and of(1).ratios([0.0, -1.0]) == [None, None]
    assert of(1).write(12.345) == "12.35 GiB" or of(1).write(12.345) == "12.34 GiB"
    assert Metric("m", "", "", 0, "", False).write(2.0) == "2.000"


@pytest.mark.parametrize(
    ("name", "better", "ratio", "shown_if_wrong"),
    [
        ("time_ms", -1, "twice the fastest of its line", False),
        ("device_p95_ms", -1, "twice the fastest of its line", False),
        ("peak_gib", -1, "twice the smallest of its line", False),
        ("gb_per_s", 1, "half the best of its line", False),
        ("flops", 0, "", False),
        ("loss_error", 0, "", True),
        ("tokens_per_s", 1, "half the best of its line", False),
    ],
)
def test_metrics(name, better, ratio, shown_if_wrong):
    found = metric(name)
    assert (found.better, found.ratio, found.shown_if_wrong) == (better, ratio, shown_if_wrong)


# Rounds of interleaved cells


def test_rounds_are_compared_in_pairs_from_twelve_on():
    twelve = [2.0] * 12
    assert abba_ratio(twelve, [1.0] * 12) == Ratio(pytest.approx(2.0), pytest.approx(2.0), pytest.approx(2.0))
    assert abba_ratio(twelve, [1.0] * 11) is None and abba_ratio(None, twelve) is None
    assert abba_ratio(twelve, [1.0] * 13).value == pytest.approx(2.0)  # the odd round is left out
    assert abba_ratio([0.0, *twelve], twelve) is None and abba_ratio([1e-9, *twelve], twelve) is not None
    above = np.exp(np.arange(12.0))
    pairs = np.log(above).reshape(-1, 2).mean(axis=1)
    averages = np.sort([(a + b) / 2 for at, a in enumerate(pairs) for b in pairs[at:]])
    found = abba_ratio(above, np.ones(12))
    assert averages_below_interval(6) == 0
    assert (found.value, found.low, found.high) == pytest.approx(
        (math.exp(np.median(averages)), math.exp(averages[0]), math.exp(averages[-1]))
    )


@pytest.mark.parametrize(("count", "below"), [(6, 0), (7, 2), (8, 3), (10, 8), (12, 13)])
def test_the_quantile_of_the_signed_rank_test(count, below):
    """Hollander and Wolfe, table A.4: the largest rank sum whose probability is at most 2.5%."""
    assert averages_below_interval(count) == below


def test_only_cells_of_one_interleaving_have_a_ratio_of_rounds():
    row = {"interleaved": "a", "round_ms": [2.0] * 12, "device_round_ms": [6.0] * 12}
    other = {"interleaved": "a", "round_ms": [1.0] * 12, "device_round_ms": [2.0] * 12}
    assert interleaved_ratio(row, other, "time_ms").value == pytest.approx(2.0)
    assert interleaved_ratio(row, other, "device_ms").value == pytest.approx(3.0)
    assert interleaved_ratio(row, other, "peak_gib") is None
    for change in ("b", None, ""):
        assert interleaved_ratio(row, other | {"interleaved": change}, "time_ms") is None
    assert interleaved_ratio(row | {"interleaved": None}, other | {"interleaved": None}, "time_ms") is None


# Losses of equal problems


def rows(*values):
    record = {"workload": "entropy_loss", "variant": "v", "dp_size": 1, "tp_size": 2}
    return [(record | {"variant": f"v{at}"}, value) for at, value in enumerate(values)]


def test_losses_may_differ_by_a_share_of_the_larger_one_or_of_one():
    assert _far_apart(rows(0.5, 0.625), 0.125) == "" and _far_apart(rows(0.5, 0.626), 0.125) != ""
    assert _far_apart(rows(8.0, 7.0), 0.125) == "" and _far_apart(rows(8.0, 6.99), 0.125) != ""
    assert _far_apart(rows(-8.0, -7.0), 0.125) == "" and _far_apart(rows(-8.0, -6.99), 0.125) != ""
    assert _far_apart([], 0.1) == "" and _far_apart(rows(math.nan, math.nan), 0.1) == ""
    said = _far_apart(rows(3.0, 1.0, math.nan, 2.0), 0.1)
    assert said == "v1 (dp1 x tp2) 1.000 and v2 (dp1 x tp2) nan; a share of 0.1 is allowed"
    assert _far_apart(rows(3.0, 9.0, 1.0), 0.1).startswith("v1 (dp1 x tp2) 9.000 and v2 (dp1 x tp2) 1.000")


# Records


@pytest.mark.parametrize(
    ("fields", "mark", "measurement"),
    [
        ({}, "", True), ({"interpreted": True}, "*", False), ({"warmed_up": False}, "^", False),
        ({"warmed_up": None}, "", True), ({"interpreted": True, "warmed_up": False}, "*", False),
        ({"status": "wrong"}, "", False), ({"interpreted": None}, "", True),
    ],
)  # fmt: skip
def test_marks(fields, mark, measurement):
    record = {"status": "ok", "interpreted": False, "warmed_up": True} | fields
    assert (caveat_mark(record), is_measurement(record)) == (mark, measurement)


def test_values_are_sorted_words_first_then_numbers_then_nothing():
    values = [None, "10", 9, "b", 2.5, "a", math.inf, True]
    assert sorted(values, key=sort_key) == ["a", "b", math.inf, True, 2.5, 9, "10", None]
    assert [value_text(value) for value in (None, math.nan, True, 1.5, 2)] == ["-", "-", "true", "1.5", "2"]


def test_fields_of_a_job_are_flat():
    assert job_fields({"job": '{"a": {"b": 1, "c": {"d": [1, 2]}}, "e": null, "f": "x"}'}) == {
        "a.b": 1, "a.c.d": "[1, 2]", "e": None, "f": "x",
    }  # fmt: skip
    assert job_fields({"job": None}) == job_fields({"job": "{"}) == {}


def test_a_missing_value_is_no_other_host():
    row = {"host": "a", "git_commit": None, "kernels_version": "1"}
    assert differing_provenance([row, row | {"host": None}]) == {}
    assert differing_provenance([row | {"host": "b"}, row]) == {"host": ["a", "b"]}


@pytest.mark.parametrize(
    ("factor", "text"), [(1.099, "1.10 times"), (1.1, "1.1 times"), (9.9, "9.9 times"), (10, "10 times")]
)
def test_times(factor, text):
    assert answers._times(factor) == text


def test_the_farthest_outliers_are_drawn_and_long_names_are_cut():
    pytest.importorskip("matplotlib")
    from tpbench.report.plots import samples, style

    values = np.concatenate([np.zeros(1000), np.linspace(-50, -5, 200), np.linspace(5, 49, 200)])
    drawn = samples._farthest(values)
    assert len(drawn) == samples.DOTS < 400 and drawn[0] == -50 and abs(drawn).min() > 5
    assert samples._deviations(np.array([1.0, 2.0, 3.0])).tolist() == [-50.0, 0.0, 50.0]
    assert samples._deviations(np.array([0.0, 0.0, 3.0])).tolist() == [0.0, 0.0, 0.0]
    assert [style.marker(at) for at in (0, len(style.MARKERS))] == [style.MARKERS[0]] * 2
    assert style.short("x" * 30, 30) == "x" * 30 and style.short("x" * 31, 30) == "x" * 27 + "..."
