"""Forecast of the time and memory of cells from stored rows."""

import pytest

from tests.support import synthetic
from tests.support.planned_jobs import job, train_job
from tpbench.launcher import devices
from tpbench.launcher.planning.forecast import Forecast, skip_predicted_oom, variant_label
from tpbench.launcher.planning.plan import Cell
from tpbench.results.read import load


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    cells = [{**row, "wall_s": 40.0} for row in synthetic.cells()]
    cells[0] |= {"key": job("triton_tp", vocab=32768, tp_size=1).key, "job": None, "wall_s": 12.0}
    return load(synthetic.write(cells, tmp_path_factory.mktemp("forecast")))


def test_expected_times(rows):
    known = Forecast(rows)
    assert known.seconds(job("triton_tp", vocab=32768, tp_size=1)) == 12.0
    assert known.seconds(job(tp_size=4)) == 40.0
    assert known.seconds(job(tp_size=16)) == 31.0


def test_rows_of_gpus_give_no_time_of_a_cpu_job(rows):
    assert Forecast(rows).seconds(job(tp_size=4, device="cpu", vocab=1000)) != 40.0


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


def test_cells_are_skipped_by_rows_of_their_output_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "smallest_memory_gib", lambda: 80.0)
    monkeypatch.chdir(tmp_path)
    out = str(tmp_path / "out")
    big = Cell(0, job("pytorch_gather", tokens=65536, output_dir=out), None)
    assert skip_predicted_oom([big], Forecast.of([big])) == [big]
    synthetic.write(synthetic.cells(), out)
    small = Cell(1, job(output_dir=out), None)
    skipped, kept = skip_predicted_oom([big, small], Forecast.of([big, small]))
    assert kept == small and skipped.skip_reason.endswith("78 GiB free (skip_predicted_oom=true)")


def test_labels_are_those_of_the_report():
    assert variant_label(job("triton_tp", block_cap=4096), ["block_cap"]) == "triton_tp"
    label = variant_label(job("pytorch_tp_manual", compile=True, graph=True))
    assert label == "pytorch_tp_manual compile=true graph=true"
