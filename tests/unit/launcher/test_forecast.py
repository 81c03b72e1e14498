"""Expected time and memory of cells."""

import pytest

from tests.support import synthetic
from tests.support.planned_jobs import job, train_job
from tpbench.job import parse_job
from tpbench.launcher.planning.forecast import expected_seconds, measured_seconds, shortage
from tpbench.launcher.planning.plan import Cell, notes


def test_a_job_that_ran_before_takes_as_long_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cell = Cell(0, job("triton_tp", vocab=32768, tp_size=1, output_dir=str(tmp_path / "out")), None)
    assert measured_seconds([cell]) == {}
    of_cell = {"key": cell.job.key, "job": None, "wall_s": 34.0, "start_s": 4.0, "interleaved_cells": 3}
    synthetic.write([next(iter(synthetic.cells())) | of_cell], tmp_path / "out")
    known = measured_seconds([cell])
    assert expected_seconds(cell.job, known) == 14.0
    assert expected_seconds(cell.job, known, starts=False) == 10.0  # three cells shared 30 s
    assert expected_seconds(job(tp_size=16), known) == 34.0
    assert expected_seconds(train_job(), known) is None
    assert expected_seconds(train_job(), {train_job().key: (110.0, 10.0)}) == 120.0


def test_a_small_cpu_job_has_an_expected_time_and_a_large_one_a_note():
    small, large = job(tp_size=4, device="cpu", vocab=1000), job("pytorch_gather", tp_size=4, device="cpu")
    assert expected_seconds(small, {}) < 20 and expected_seconds(large, {}) is None
    assert expected_seconds(job(tp_size=4, device="cpu", vocab=1000, timeout_s=5), {}) == 5
    (note,) = notes([Cell(0, small, None), Cell(1, large, None)])
    assert note.startswith("large cells run on the CPU: expect minutes or hours")
    assert notes([Cell(0, small, None), Cell(1, large, skip_reason="no")]) == []


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (
            {"variant": "triton_tp", "tokens": 2**18, "vocab": 2**17, "tp_size": 2},
            "a rank needs at least 32 GiB, 10 GiB free",
        ),
        (
            {"variant": "linear_tp", "tokens": 64, "hidden": 2**14, "vocab": 2**19, "tp_size": 2},
            "a rank needs at least 16 GiB, 10 GiB free",
        ),
        (train_job(layers=4000).flat(), "expected to need "),
        ({**train_job(layers=4000).flat(), "accumulate": 1}, "the larger of gradients "),
    ],
)
def test_what_the_inputs_and_the_model_need_is_known_without_rows(values, reason):
    big = parse_job({**values, "device": "cpu"})
    assert reason in shortage(big, None, 20.0)
    assert reason.replace("10 GiB free", "4.75 GiB free") in shortage(
        parse_job({**values, "device": "cuda", "memory_limit_gib": 5}), 80.0, None
    )
    assert shortage(big, None, 1e6) is shortage(big, None, None) is None
