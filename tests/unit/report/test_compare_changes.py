"""Verdicts, uncertainties and conditions of a comparison, from small records without files."""

import math

import pytest

from tpbench.report.analysis.changes import compare_cells
from tpbench.report.analysis.pairs import differences, remarks
from tpbench.report.analysis.row_values import metric

STEADY = [1.0 + 0.0001 * step for step in range(21)]


def record(**fields):
    """Return a row of a right cell: 21 samples of about 1 ms."""
    usual = {
        "workload": "entropy_loss", "variant": "triton_tp", "hardware": "GPU", "device": "cuda", "status": "ok",
        "reason": None, "interpreted": False, "warmed_up": True, "time_ms": 1.0, "samples_ms": STEADY,
        "peak_gib": 2.0, "started_at": None,
    }  # fmt: skip
    return {**usual, **fields}


def slower(factor, **fields):
    return record(**{"time_ms": factor, "samples_ms": [factor * each for each in STEADY], **fields})


def pair(before, after, name="cell"):
    return name, *(side if isinstance(side, list) else [side] if side else [] for side in (before, after))


def change(before, after, metric_name="time_ms", threshold=0.03, **options):
    (found,) = compare_cells([pair(before, after)], metric(metric_name), threshold, **options).changes
    return found


@pytest.mark.parametrize(
    ("before", "after", "verdict", "fails"),
    [
        ("ok", "ok", "same", False),
        *(("ok", failed, "fails now", True) for failed in ("oom", "wrong", "timeout", "error")),
        *((failed, "ok", "works now", False) for failed in ("oom", "wrong", "timeout", "error")),
        ("ok", "skipped", "not comparable", False),
        ("skipped", "ok", "not comparable", False),
        ("oom", "oom", "same", False),
        ("oom", "error", "not comparable", False),
    ],
)
def test_statuses(before, after, verdict, fails):
    found = change(record(status=before), record(status=after, reason="it broke" if after == "error" else None))
    assert (found.verdict, found.fails) == (verdict, fails)
    if (before, after) != ("ok", "ok"):
        reason = ": it broke" if (before, after) == ("ok", "error") else ""
        assert found.notes[0] == f"{before}, then {after}{reason}" and found.p is None


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [(1.5, "slower"), (0.5, "faster"), (1.02, "same"), (1 / 1.02, "same"), (1.1, "slower"), (1.031, "unclear")],
)
def test_a_difference_counts_above_the_threshold_if_it_is_significant(factor, verdict):
    found = change(record(), slower(factor))
    assert found.verdict == verdict
    assert found.ratio.value == pytest.approx(factor) and found.ratio.low < factor < found.ratio.high
    assert found.fails == (verdict == "slower")


def test_a_small_difference_with_a_wide_interval_is_unclear():
    noisy = [each**3 / 10 for each in range(1, 22)]
    found = change(record(samples_ms=noisy), slower(1.01, samples_ms=noisy))
    assert found.verdict == "unclear" and found.ratio.high > 1.3 and not found.fails


def test_memory_counts_from_a_mebibyte_on():
    small = record(peak_gib=0.001)
    tiny = change(small, record(peak_gib=0.001 + 2**-10 - 1e-9), "peak_gib")
    assert tiny.verdict == "same" and tiny.notes == ["less than 1 MiB never counts"]
    assert change(small, record(peak_gib=0.001 + 2**-10), "peak_gib").verdict == "worse"
    assert change(record(peak_gib=0.002), small, "peak_gib").verdict == "better"
    assert change(record(), slower(1.5, time_ms=1.0 + 2**-11), "time_ms", 0.0).verdict != "worse"


def test_without_enough_samples_only_several_rows_tell():
    few = [1.0, 1.1, 0.9]
    one = change(record(samples_ms=few), slower(2.0, samples_ms=few))
    assert (one.verdict, one.notes[-1], one.p) == (
        "not comparable",
        "too few samples to tell: measure=default takes enough",
        None,
    )
    assert (one.ratio.value, one.ratio.low) == (pytest.approx(2.0), None)
    assert change(record(samples_ms=few), record(samples_ms=few, time_ms=1.02)).verdict == "same"
    rows = [[record(samples_ms=few, time_ms=value * (1 + 0.001 * at)) for at in range(3)] for value in (1.0, 2.0)]
    three = change(*rows)
    assert three.verdict == "slower" and three.p < 0.05
    assert change(rows[0][:2], rows[1]).verdict == "not comparable"  # two rows on one side
    assert change(record(), slower(2.0, samples_ms=few)).verdict == "not comparable"  # one side knows its spread


def test_a_value_that_says_nothing_cannot_be_compared():
    for value in (-1.0, math.nan, math.inf, None):
        found = change(record(), record(time_ms=value))
        assert (found.verdict, found.notes) == ("not comparable", ["time_ms is missing on a side"])


def test_a_metric_that_was_zero_and_is_not_any_more_is_worse():
    for before, after, verdict in ((0.0, 1.0, "worse"), (1.0, 0.0, "better"), (0.0, 0.0, "same"), (0.0, 1e-4, "same")):
        found = change(record(peak_gib=before), record(peak_gib=after), "peak_gib")
        assert (found.verdict, found.ratio, found.fails) == (verdict, None, verdict == "worse") and found.is_decided


def test_what_was_tested_and_decided():
    sides = [
        pair(record(), slower(1.5)), pair(record(), slower(1.001)), pair(record(status="oom"), record(status="oom")),
        pair(record(), None), pair(record(), record(status="oom")), pair(record(), record(samples_ms=[1.0] * 3)),
    ]  # fmt: skip
    comparison = compare_cells(sides, metric("time_ms"), 0.03)
    assert [each.verdict for each in comparison.changes if each.is_decided] == ["slower", "same", "fails now", "same"]
    (alone,) = compare_cells(sides[:1], metric("time_ms"), 0.03).changes
    assert comparison.changes[0].p == pytest.approx(2 * alone.p)  # Holm's correction for two tests


@pytest.mark.parametrize(
    ("fields", "cpu", "said"),
    [
        ({"cpu_model": ("A", "B")}, False, []),
        ({"cpu_model": ("A", "B")}, True, ["cpu_model A and B"]),
        ({"memory_limit_gib": (1.0, 2.0)}, True, []),
        ({"gpu_name": ("A", None)}, False, []),
        ({"gpu_name": ("A", "B"), "backend": ("nccl", "gloo")}, False, ["gpu_name A and B", "backend nccl and gloo"]),
        ({"beside": ("x", "y")}, False, ["other jobs ran beside it before and after"]),
    ],
)
def test_rows_under_different_conditions_are_not_compared(fields, cpu, said):
    before, after = (
        record(device="cpu" if cpu else "cuda", **{name: pair[at] for name, pair in fields.items()}) for at in (0, 1)
    )
    assert differences(before, after) == said
    assert differences(before, after, allowed=tuple(fields)) == []


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ({"host": "a"}, {"host": "b"}, ["host a and b"]),
        (
            {"environment": '{"OMP_NUM_THREADS": "4", "NCCL_ALGO": "Ring", "CUDA_VISIBLE_DEVICES": "0"}'},
            {"environment": '{"OMP_NUM_THREADS": "8", "CUDA_LAUNCH_BLOCKING": "1"}'},
            ["CUDA_LAUNCH_BLOCKING unset and 1", "NCCL_ALGO Ring and unset", "OMP_NUM_THREADS 4 and 8"],
        ),
        ({"environment": "[]"}, {"environment": "{"}, []),
        ({"git_commit": "0123456789abcdef"}, {"git_commit": "f" * 40}, ["git_commit 0123456789ab and ffffffffffff"]),
    ],
)
def test_remarks_about_runs_that_can_be_compared(before, after, said):
    assert remarks(record(**before), record(**after)) == said
