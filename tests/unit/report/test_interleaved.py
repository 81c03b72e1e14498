"""Ratios of cells that were measured interleaved."""

from __future__ import annotations

import csv
import io
import re

import numpy as np
import pytest
from scipy import stats
from tpbench.report.tables.render import comma_separated, pivot_text

from tests.support import synthetic
from tpbench.report.analysis.ratios import abba_ratio, averages_below_interval, ratio
from tpbench.report.page.html_page import page
from tpbench.report.pivot import pivot
from tpbench.results.read import load


def rounds(count, slower, drift, noise, seed=0):
    """Medians of A's and B's rounds in the order A B B A, while everything gets slower by `drift` each time."""
    random = np.random.default_rng(seed)
    made = {"A": [], "B": []}
    for position, name in enumerate("ABBA" * (count // 2)):
        level = {"A": 1.0, "B": slower}[name] * np.exp(drift * position)
        made[name].append(level * np.exp(noise * random.standard_normal()))
    return made["A"], made["B"]


def test_steady_drift_cancels():
    for drift in (0, 0.01, -0.05):
        fast, slow = rounds(12, 1.25, drift, 0)
        found = abba_ratio(slow, fast)
        assert [found.low, found.value, found.high] == pytest.approx([1.25] * 3)


def test_the_interval_holds_the_truth_as_often_as_it_says():
    found = [abba_ratio(*reversed(rounds(24, 1.1, 0.01, 0.03, seed))) for seed in range(600)]
    assert 0.93 <= np.mean([each.low <= 1.1 <= each.high for each in found]) <= 0.985


def test_it_is_narrower_than_without_interleaving_where_the_machine_drifts():
    fast, slow = rounds(24, 1.1, 0.02, 0.005)
    by_rounds, pooled = abba_ratio(slow, fast), ratio(slow, fast)
    assert by_rounds.high - by_rounds.low < 0.1 * (pooled.high - pooled.low)


@pytest.mark.parametrize("count", [6, 7, 10, 12, 20])
def test_the_signed_rank_quantile_is_the_tabled_one(count):
    """So many of the 2**n sign patterns have a rank sum that small: counted by scipy's exact test."""

    def one_sided(rank_sum):
        signs = np.array([-1.0 if rank <= 0 else 1.0 for rank in _negative(rank_sum, count)])
        return stats.wilcoxon(signs * np.arange(1, count + 1), alternative="greater", method="exact").pvalue

    below = averages_below_interval(count)
    assert one_sided(below) <= 0.025 < one_sided(below + 1)


def _negative(rank_sum, count):
    """Ranks with signs such that the positive ones add up to n (n + 1) / 2 - rank_sum."""
    signs = [1] * count
    for rank in range(count, 0, -1):
        if rank <= rank_sum:
            signs[rank - 1], rank_sum = 0, rank_sum - rank
    return signs


def test_few_rounds_and_none():
    fast, slow = rounds(12, 1.5, 0, 0.01)
    assert abba_ratio(slow[:11], fast) is None and abba_ratio(None, fast) is None
    assert abba_ratio(slow, fast[:12] + [9.0] * 5) == abba_ratio(slow, fast)  # only what both have


@pytest.fixture
def frame(tmp_path):
    """Two interleaved variants and a third one by itself."""
    fast, slow = rounds(24, 1.25, 0.001, 0.001)
    together = {"interleaved": "s-0-1", "interleaved_cells": 2}
    rows = [
        synthetic.cell("triton_tp", 32768, 4, **together, round_ms=fast, device_round_ms=fast),
        synthetic.cell("pytorch_tp_manual", 32768, 4, **together, round_ms=slow, device_round_ms=slow),
        synthetic.cell("pytorch_gather", 32768, 4, interleaved="s-7-1", round_ms=slow, device_round_ms=slow),
    ]
    return load(synthetic.write(rows, tmp_path))


def test_reports_show_the_ratio_with_its_interval(frame):
    text = pivot_text(frame, "device_ms").plain
    assert re.search(r"ms \(1\.2\d+x, 1\.2\d+ to 1\.2\d+\)", text) and "signed-rank interval" in text
    assert text.count(" to 1.") == 1  # not of the cell that was interleaved with others
    (line,) = csv.DictReader(io.StringIO(comma_separated(pivot(frame, "device_ms"))))
    value, low, high = map(
        float, re.search(r"pytorch_tp_manual: (\S+)x interleaved, (\S+) to ([\d.]+)", line["notes"]).groups()
    )
    assert low < value < high and 1.24 < value < 1.26
    assert "signed-rank" not in pivot_text(frame, "peak_gib").plain
    html = page(frame, "device_ms")
    assert html.count(">interleaved<") == 2 and html.count(">one after the other<") == 2
