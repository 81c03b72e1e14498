"""Forecast of the time and memory of cells from stored rows."""

import pytest

from tests.support import synthetic
from tests.support.planned_jobs import job, train_job
from tpbench.job import parse_job
from tpbench.launcher.planning import forecast
from tpbench.launcher.planning.forecast import Forecast
from tpbench.launcher.planning.plan import Cell, notes
from tpbench.results.read import load


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    cells = [{**row, "wall_s": 40.0} for row in synthetic.cells()]
    cells[0] |= {"key": job("triton_tp", vocab=32768, tp_size=1).key, "job": None, "wall_s": 12.0}
    return load(synthetic.write(cells, tmp_path_factory.mktemp("forecast")))


def test_expected_times(rows):
    known = Forecast(rows)
    assert known.seconds(job("triton_tp", vocab=32768, tp_size=1)) == 12.0
    assert known.seconds(job(tp_size=16)) == 34.0


def test_a_small_cpu_job_has_an_expected_time_and_a_large_one_a_note(rows):
    known = Forecast(rows)
    small, large = job(tp_size=4, device="cpu", vocab=1000), job("pytorch_gather", tp_size=4, device="cpu")
    assert known.seconds(small) < 20 and known.seconds(large) is None
    assert known.seconds(job(tp_size=4, device="cpu", vocab=1000, timeout_s=5)) == 5
    (note,) = notes([Cell(0, small, None), Cell(1, large, None)])
    assert note.startswith("large cells run on the CPU: expect minutes or hours")
    assert notes([Cell(0, small, None), Cell(1, large, skip_reason="no")]) == []


def test_a_train_step_has_a_known_time_only_if_it_ran_before():
    known = Forecast(None)
    assert known.seconds(train_job()) is None
    known.wall_s[train_job().key] = 120.0
    assert known.seconds(train_job()) == 120.0


def test_predicted_oom(rows):
    big = job("pytorch_gather", tokens=65536)
    on_gpu, without_gpu = Forecast(rows, gpu_memory_gib=80.0), Forecast(rows)
    assert on_gpu.oom_reason(big) and without_gpu.oom_reason(big) is None
    assert without_gpu.oom_reason(job("pytorch_gather", tokens=65536, memory_limit_gib=20.0))
    assert on_gpu.oom_reason(job("triton_tp", tokens=65536, block_cap=4096)) is None
    assert on_gpu.oom_reason(job("pytorch_gather", tokens=65536, compute_dtype="logits")) is None


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
    ],
)
def test_what_the_inputs_and_the_model_need_is_known_without_rows(values, reason):
    big = parse_job({**values, "device": "cpu"})
    assert reason in Forecast(None, cpu_memory_gib=20.0).oom_reason(big)
    assert Forecast(None, cpu_memory_gib=1e6).oom_reason(big) is Forecast(None).oom_reason(big) is None


def test_a_forecast_knows_the_rows_of_the_cells_output_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(forecast, "this_gpu", lambda: ("GPU", 80.0))
    monkeypatch.chdir(tmp_path)
    big = Cell(0, job("pytorch_gather", tokens=65536, output_dir=str(tmp_path / "out")), None)
    assert Forecast.of([big]).oom_reason(big.job) is None
    synthetic.write(synthetic.cells(), tmp_path / "out")
    assert Forecast.of([big]).oom_reason(big.job).endswith("78 GiB free")
