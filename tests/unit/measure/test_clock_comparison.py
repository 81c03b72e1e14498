"""The comparison of wall time and device time, on samples that are made up and on the committed rows."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.command import ROOT
from tpbench.measure.clock_comparison import late_idle_reason, long_wait_reason
from tpbench.measure.columns import Samples
from tpbench.results.read import load


def samples(*iterations: tuple[float, ...]) -> list[np.ndarray]:  # type: ignore[type-arg]
    return [np.array(each) for each in iterations]


@pytest.mark.parametrize(
    ("waits", "device"),
    [
        pytest.param([(0.02, 0.02)] * 5, [(0.05, 0.05)] * 3, id="the host is slow: the device is idle when it returns"),
        pytest.param([(9.9, 10.1)] * 5, [(10.0, 10.0)] * 3, id="the host is fast: it waits for the whole iteration"),
        pytest.param([(0.02, 4.0), (4.0, 0.02)] * 2, [(0.05, 0.05)] * 3, id="a rank waits for another rank's host"),
        pytest.param([(0.05,), (50.0,), (0.05,)], [(0.05,)], id="one iteration is interrupted"),
        pytest.param([(0.1,)] * 3, [(0.001,)] * 3, id="the device does next to nothing"),
        pytest.param([(1.9, 1.9)] * 3, [(0.1, 1.0)] * 3, id="the slowest rank of the device time counts"),
    ],
)
def test_an_honest_host_waits_for_at_most_an_iteration(
    waits: list[tuple[float, ...]], device: list[tuple[float, ...]]
) -> None:
    assert long_wait_reason(samples(*waits), samples(*device)) is None


def test_a_long_wait_shows_work_that_the_end_event_does_not_wait_for() -> None:
    found = long_wait_reason(samples((5.0, 5.2), (4.9, 5.0), (5.1, 5.0)), samples((0.01, 0.02), (0.02, 0.01)))
    assert found == (
        "the device works for 5 ms after the step has returned, and 0.02 ms between the events: they miss work on "
        "another stream. Let that stream wait for the current one before it begins, and let the current stream wait "
        "for it before the step returns"
    )
    assert long_wait_reason(samples((2.2,)), samples((1.0,))) is not None
    assert long_wait_reason(samples((2.1,)), samples((1.0,))) is None


@pytest.mark.parametrize(
    ("wall", "device"),
    [
        pytest.param([(130.7, 130.6)] * 3, [(130.6, 130.5)] * 3, id="the host decides both times"),
        pytest.param([(101.9, 102.9)] * 3, [(100.0, 100.0)] * 3, id="a share of the device time and a millisecond"),
        pytest.param([(10.1,), (90.0,), (10.1,)], [(10.0,)] * 3, id="one iteration is interrupted"),
        pytest.param([(10.0,)] * 3, [(10.4,)] * 3, id="the device time is longer"),
    ],
)
def test_an_honest_device_is_idle_right_after_the_end_event(
    wall: list[tuple[float, ...]], device: list[tuple[float, ...]]
) -> None:
    assert late_idle_reason(samples(*wall), samples(*device)) is None


def test_a_device_that_works_after_the_end_event_is_found_on_any_rank() -> None:
    found = late_idle_reason(samples((10.0, 19.0), (10.0, 18.9), (10.0, 19.1)), samples(*[(9.9, 10.0)] * 3))
    assert found is not None and found.startswith("the device works for 9 ms after the end event, and 10 ms between")
    assert late_idle_reason(samples((103.1,)), samples((100.0,))) is not None


def of_committed_rows(scheduled: bool) -> list[tuple[Samples, Samples]]:
    """Return the times by wall clock and between events of each row on GPUs: per iteration that of the slowest rank."""
    columns = ["status", "workload", "layers", "samples_ms", "device_samples_ms"]
    rows = load([ROOT / "outputs", ROOT / "tpbench/kernels/rows"], columns=columns, status="ok")
    rows = rows[rows["device_samples_ms"].notna()]
    is_scheduled = (rows["workload"] == "train_step") | (rows["layers"].fillna(0) > 0)
    return [
        tuple([np.array([each]) for each in times] for times in row)  # type: ignore[misc]
        for row in rows[is_scheduled == scheduled][["samples_ms", "device_samples_ms"]].itertuples(index=False)
    ]


def test_no_training_step_of_the_committed_rows_is_refused() -> None:
    """Nor would one be with ten times the difference of its clocks."""
    rows = of_committed_rows(scheduled=True)
    assert rows
    for wall, device in rows:
        assert late_idle_reason(wall, device) is None
        larger = [one + 9 * (one - other) for one, other in zip(wall, device, strict=True)]
        assert late_idle_reason(larger, device) is None


def test_most_committed_rows_cannot_be_refused_whatever_the_host_waits() -> None:
    """A wait is a part of the wall time, which rows store. Nothing is known of the others: their host is slow."""
    rows = of_committed_rows(scheduled=False)
    known = [long_wait_reason(wall, device) is None for wall, device in rows]
    assert sum(known) > len(known) / 2
