"""Forecast of the time and memory of cells from stored rows."""

import pytest

from tests.support import synthetic
from tests.support.planned_jobs import job, train_job
from tpbench.job import parse_job
from tpbench.launcher.planning import forecast, plan
from tpbench.launcher.planning.forecast import Forecast, skip_predicted_oom
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


def test_a_cpu_job_takes_as_long_as_its_row_and_at_most_its_timeout(rows, monkeypatch):
    monkeypatch.setattr(plan, "available_cores", lambda: 2)
    known = Forecast(rows)
    small, large = job(tp_size=4, device="cpu", vocab=1000), job("pytorch_gather", tp_size=4, device="cpu")
    assert known.seconds(small) < 20 and known.seconds(large) > 120
    (note,) = notes([Cell(0, small, None), Cell(1, large, None)])
    assert note.startswith("large cells run on the CPU: expect about 2.5 minutes, and no measurement")
    assert "shapes whose names begin with tiny_ take seconds" in note
    assert notes([Cell(0, small, None), Cell(1, large, skip_reason="no")]) == []
    (note,) = notes([Cell(0, job(tp_size=4, device="cpu", tokens=2**40), None)])
    assert "about 10.0 minutes" in note  # its timeout_s
    short = job(tp_size=4, device="cpu", vocab=1000, timeout_s=5)
    seconds, (remark,) = known.outcome(short)
    assert seconds == 5 and remark.startswith("expected to end as timeout: it needs ")


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


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_cell_whose_last_run_ran_out_of_memory_is_expected_to_run_out(tmp_path, device):
    cells = [job(device=device, seed=1), job(device=device, seed=2)]
    memory = {"cuda": {"gpu_name": "NVIDIA H100"}, "cpu": {"memory_gib": 16.0}}[device]
    base = next(iter(synthetic.cells())) | {"device": device, "job": None, "wall_s": 5.0}
    base |= {"world_size": 4, "memory_limit_gib": None} | memory
    oom = {**base, "status": "oom", "key": cells[0].key}
    frame = load(synthetic.write([oom, {**base, "key": cells[1].key}], tmp_path))
    known = Forecast(frame, gpu_memory_gib=79.2, cpu_memory_gib=14.0)
    assert "its last run did, within " in known.oom_reason(cells[0]) and known.outcome(cells[0])[0] == 5.0
    assert known.oom_reason(cells[1]) is None
    assert Forecast(frame, gpu_memory_gib=139.8, cpu_memory_gib=64.0).oom_reason(cells[0]) is None


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


def test_cells_are_skipped_by_rows_of_their_output_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(forecast, "this_gpu", lambda: ("GPU", 80.0))
    monkeypatch.chdir(tmp_path)
    out = str(tmp_path / "out")
    big = Cell(0, job("pytorch_gather", tokens=65536, output_dir=out), None)
    assert skip_predicted_oom([big], Forecast.of([big])) == [big]
    synthetic.write(synthetic.cells(), out)
    small = Cell(1, job(output_dir=out), None)
    skipped, kept = skip_predicted_oom([big, small], Forecast.of([big, small]))
    assert kept == small and skipped.skip_reason.endswith("78 GiB free (skip_predicted_oom=true)")
