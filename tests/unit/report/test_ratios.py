"""Numbers of a report: their digits, what is better, and ratios with intervals."""

import csv
import io
import math
import re

import numpy as np
import pytest

from tests.support import synthetic
from tpbench.report.analysis.comparison import compare, ratios_to_best
from tpbench.report.analysis.row_values import Record, metric
from tpbench.report.pivot import pivot
from tpbench.results.read import load
from tpbench.suggestions import number, ratio_text
from tpbench.tables import as_csv, as_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.000"), (0.09999, "0.1"), (0.1, "0.100"), (-0.1, "-0.100"), (0.012345, "0.0123"), (9.9994, "9.999"),
        (10, "10.00"), (-10, "-10.00"), (99.994, "99.99"), (100, "100.0"), (999.94, "999.9"), (1000, "1000"),
        (12345.6, "12346"), (-1000, "-1000"), (math.inf, "inf"), (math.nan, "nan"), (1e-9, "1e-09"),
        (9e14, "900000000000000"), (1e15, "1e+15"), (-1e308, "-1e+308"),
    ],
)  # fmt: skip
def test_about_four_digits(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.5, "0.50x"), (9.99, "9.99x"), (10, "10.0x"), (99.9, "99.9x"), (100, "100x"), (999, "999x"), (1000, ">999x")],
)
def test_ratios_as_text(value, text):
    assert ratio_text(value) == text


@pytest.mark.parametrize(
    ("name", "expected"), [("peak_gib", [1, 2]), ("gb_per_s", [2, 1]), ("loss_value", [None, None])]
)
def test_a_ratio_is_that_to_the_best_sound_value(name, expected):
    usual = {"status": "ok", "interpreted": False, "warmed_up": True}
    values = [2.0, 4.0, 0.0, -1.0, math.inf, math.nan]
    ratios = ratios_to_best([Record(usual | {name: value}) for value in values], metric(name))
    assert [ratio and ratio.value for ratio in ratios] == [
        *(value and pytest.approx(value) for value in expected),
        *[None] * 4,
    ]


def rounds(count, slower, drift, noise, seed=0):
    """Medians of A's and B's rounds in the order A B B A, while everything gets slower by `drift` each time."""
    random = np.random.default_rng(seed)
    made = {"A": [], "B": []}
    for position, name in enumerate("ABBA" * (count // 2)):
        level = {"A": 1.0, "B": slower}[name] * np.exp(drift * position)
        made[name].append(level * np.exp(noise * random.standard_normal()))
    return made["A"], made["B"]


def by_rounds(above, below, metric_name="time_ms", **changes):
    """Return the ratio of two rows that have these rounds with their medians, and no samples."""
    usual = {"status": "ok", "interpreted": False, "warmed_up": True, "interleaved": "x", "peak_gib": 1.0}
    rows = [
        usual | {"round_ms": values, "device_round_ms": values, "time_ms": (median := float(np.median(values or 1)))}
        | {"device_ms": median}
        for values in (below, above)
    ]  # fmt: skip
    return compare([rows[0] | changes], rows[1:], metric(metric_name))


def test_rounds_are_compared_in_pairs_from_twelve_on():
    twelve = [2.0] * 12
    assert by_rounds(twelve, [1.0] * 12).value == pytest.approx(2.0)
    for few in ([1.0] * 11, None, [0.0, *twelve]):  # no interval: the rows have no samples either
        ratio = by_rounds(twelve, few)
        assert ratio.low is None and not ratio.interleaved
    assert by_rounds(twelve, [1.0] * 12 + [9.0] * 5) == by_rounds(twelve, [1.0] * 12)  # only what both have
    assert by_rounds(twelve, twelve).decided is False


def test_a_ratio_is_that_of_the_printed_medians():
    """One slow round of 28 once made "1.821x" of 0.184 and 0.111 ms. It must not change the order of cells either."""
    fast, slow = rounds(28, 1.66, 0.0, 0.02)
    once = by_rounds([*slow[:9], 12 * slow[9], *slow[10:]], fast)
    assert once.value == pytest.approx(np.median(slow) / np.median(fast), rel=0.01)
    assert 1.5 < once.low < once.value < once.high < 1.8
    # In two thirds of the rounds A takes 1 and B 1.02, else A takes 9 and B 1.02: the median and the mean contradict.
    torn = by_rounds([1.02] * 24, [1.0, 1.0, 1.0, 1.0, 9.0, 9.0] * 4)
    assert torn.value == pytest.approx(1.02) and not torn.decided


def test_a_ratio_of_two_rows_allows_for_the_scatter_of_runs():
    """Two short runs differ by tens of percent by chance: only an interval that excludes a tie decides."""

    def row(time_ms, spread):
        samples = [time_ms * (1 + spread * at / 10) for at in range(-10, 11)]
        return {"status": "ok", "interpreted": False, "warmed_up": True, "interleaved": None, "time_ms": time_ms,
                "samples_ms": samples}  # fmt: skip

    noisy, steady = (compare([row(1.0, spread)], [row(1.5, spread)], metric("time_ms")) for spread in (0.5, 0.01))
    assert noisy.low < 1 < noisy.high and not noisy.decided
    assert 1 < steady.low < 1.5 < steady.high and steady.decided
    few = compare([row(1.0, 0.1)], [row(9.0, 0.1) | {"samples_ms": [9.0] * 5}], metric("time_ms"))
    assert (few.value, few.low, few.decided) == (pytest.approx(9.0), None, False)
    extreme = compare([row(1e-300, 0.01)], [row(1e300, 0.01)], metric("time_ms"))
    assert (extreme.value, extreme.decided, ratio_text(extreme.value)) == (math.inf, True, ">999x")
    assert compare([row(1e300, 0.01)], [row(1e-300, 0.01)], metric("time_ms")).value == 0
    assert compare([row(1.0, 0.1) | {"time_ms": None}], [row(1.0, 0.1)], metric("time_ms")) is None

    def share(value):
        """Return a row whose wall times scatter and whose device times, by which the share is, do not."""
        return row(1.0, 0.5) | {"fraction_of_floor": value, "device_samples_ms": [1.0] * 9}

    assert compare([share(0.6)], [share(0.9)], metric("fraction_of_floor")).decided


@pytest.mark.parametrize(("noise", "of_setup"), [(0.03, 0.0), (0.001, 0.004)])
def test_the_interval_holds_the_truth_as_often_as_it_says(noise, of_setup):
    """`of_setup`: scatter of the ratio that is the same in all rounds, as of cells with the same work on GPUs."""
    slower = 1.1 * np.exp(of_setup * np.random.default_rng(0).standard_normal(600))
    found = [by_rounds(*reversed(rounds(24, each, 0.01, noise, seed))) for seed, each in enumerate(slower)]
    assert 0.93 <= np.mean([each.low <= 1.1 <= each.high for each in found]) <= 0.995


def test_only_cells_of_one_interleaving_have_a_ratio_of_rounds():
    assert by_rounds([2.0] * 12, [1.0] * 12, "device_ms").value == pytest.approx(2.0)
    assert not by_rounds([2.0] * 12, [1.0] * 12, "peak_gib").interleaved
    for change in ({"interleaved": "b"}, {"interleaved": None}, {"sweep_id": "another"}):
        assert not by_rounds([2.0] * 12, [1.0] * 12, **change).interleaved


def test_reports_show_the_ratio_of_interleaved_cells_with_its_interval(tmp_path):
    fast, slow = rounds(24, 1.25, 0.001, 0.001)
    together = {"interleaved": "s-0-1", "interleaved_cells": 2}
    rows = [
        synthetic.cell("triton_tp", 32768, 4, **together, device_ms=np.median(fast), device_round_ms=fast),
        synthetic.cell("pytorch_tp_manual", 32768, 4, **together, device_ms=np.median(slow), device_round_ms=slow),
        synthetic.cell("pytorch_gather", 32768, 4, interleaved="s-7-1", device_ms=2.0, device_round_ms=slow),
    ]
    frame = load(synthetic.write(rows, tmp_path))
    document = pivot(frame, "device_ms")
    text = as_text(document).plain
    assert re.search(r"ms \(1\.2\d+x, 1\.2\d+ to 1\.2\d+\)", text) and "interleaved, A B B A" in text
    assert text.count(" to 1.") == 1  # not of the cell that was interleaved with others
    (line,) = csv.DictReader(io.StringIO(as_csv(document)))
    value, low, high = (float(line[f"pytorch_tp_manual x{end}"]) for end in ("", " low", " high"))
    assert low < value < high and 1.24 < value < 1.26
    assert "interleaved, A B B A" not in as_text(pivot(frame, "peak_gib")).plain
