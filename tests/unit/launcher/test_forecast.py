"""Forecast of the time and memory of cells from stored rows."""

import pytest

from tests.support import synthetic
from tests.support.planned_jobs import job, train_job
from tpbench.job import parse_job
from tpbench.launcher import devices
from tpbench.launcher.planning.forecast import START_S, Forecast, skip_predicted_oom, variant_label
from tpbench.launcher.planning.plan import Cell
from tpbench.measure.session import MeasureSettings
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
    assert variant_label(job("triton_tp", block_cap=4096)) == "triton_tp"
    label = variant_label(job("pytorch_tp_manual", compile=True, graph=True))
    assert label == "pytorch_tp_manual compile=true graph=true"


@pytest.mark.parametrize("variant", ["pytorch_gather", "triton_tp"])
def test_the_time_on_a_cpu_depends_on_the_size(variant):
    sizes = [(64, 1000), (4096, 32768), (4096, 131072), (65536, 131072)]
    times = [
        Forecast(None).seconds(job(variant, device="cpu", tp_size=2, tokens=tokens, vocab=vocab))
        for tokens, vocab in sizes
    ]
    start = START_S + MeasureSettings().time_budget_s
    assert times[0] == pytest.approx(start, abs=1)
    assert times == sorted(times) and len(set(times)) == len(times)
    works = [time - start for time in times]
    assert works[2] == pytest.approx(4 * works[1])
    assert works[3] == pytest.approx(64 * works[1])


def test_other_workloads_on_a_cpu_depend_on_their_size_too():
    block = {"hidden": 1024, "ffn": 4096, "heads": 16, "kv_heads": 4, "head_dim": 64, "device": "cpu", "tp_size": 2}
    table = {"width": 256, "tokens": 64, "tp_size": 1, "dp_size": 2, "device": "cpu"}
    for small, large in (
        (parsed("block_tp", **block, tokens=64), parsed("block_tp", **block, tokens=8192)),
        (parsed("dense_all_reduce", **table, table_rows=64), parsed("dense_all_reduce", **table, table_rows=10**7)),
    ):
        assert Forecast(None).seconds(large) > Forecast(None).seconds(small) + 60


def test_the_quickest_row_of_a_cpu_is_the_start(tmp_path):
    rows = [
        synthetic.cell("pytorch_gather", vocab, 2, device="cpu", wall_s=wall_s)
        for vocab, wall_s in ((32768, 9.0), (131072, 50.0))
    ]
    known = Forecast(load(synthetic.write(rows, tmp_path)))
    assert known.seconds(job("pytorch_gather", device="cpu", tp_size=2, tokens=16, vocab=64)) == pytest.approx(9, abs=1)


def parsed(variant, **values):
    return parse_job({"variant": variant, **values})
