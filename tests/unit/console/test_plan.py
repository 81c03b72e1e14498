"""A dry run says what would happen, and why."""

import pytest

from tests.support import synthetic
from tpbench.console.plan import Expectations, describe, foretell, head, without_predicted_oom
from tpbench.job import parse_job
from tpbench.launcher.plan import Cell, told_apart
from tpbench.results.read import load


def job(variant="triton_tp", **values):
    plain = {"tokens": 4096, "vocab": 131072, "tp_size": 4, "device": "cuda", "loss": "cross_entropy"}
    return parse_job({"variant": variant, **plain, **values})


MODEL = {
    "architecture": "llama", "hidden_size": 64, "ffn_size": 96, "layers": 2, "heads": 4, "kv_heads": 4, "head_dim": 16,
    "vocab": 128,
}  # fmt: skip


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    made = [{**row, "wall_s": 40.0} for row in synthetic.cells()]
    made[0]["key"] = job("triton_tp", vocab=32768, tp_size=1).key
    made[0]["wall_s"] = 12.0
    return load(synthetic.write(made, tmp_path_factory.mktemp("plan")))


def test_a_plan(rows):
    cells = [
        Cell(0, job(), None),
        Cell(1, job("pytorch_gather", tokens=65536), None),
        Cell(2, job(tp_size=8), obstacle="needs 8 GPUs, found 4"),
        Cell(3, job(), None, same_as=0),
    ]
    said = describe(cells, rows, gpu_memory_gib=80.0)
    lines = said.splitlines()
    assert "4 GPUs" in lines[1] and lines[1].endswith("0.7 min")
    assert "predicted to run out of memory: 120 GiB" in lines[2]
    assert lines[3].endswith("skipped: needs 8 GPUs, found 4") and lines[4].endswith("the same job as cell 0")
    assert (
        lines[-1]
        == "4 cells, 2 to run, at most 4 GPUs for one, about 1.3 minutes one after the other. Nothing was run."
    )


def test_no_two_lines_are_the_same():
    said = describe(told_apart([Cell(0, job(seed=1), None), Cell(1, job(seed=2), None)]))
    first, second = said.splitlines()[1:3]
    assert "tp_size=4 seed=1 " in first and "tp_size=4 seed=2 " in second


def test_from_the_output_folder(rows, tmp_path, monkeypatch):
    monkeypatch.setattr("tpbench.console.machine.gpu_memory_gib", lambda: 80.0)
    monkeypatch.chdir(tmp_path)
    out = str(tmp_path / "out")
    big = Cell(0, job("pytorch_gather", tokens=65536, output_dir=out), None)
    assert without_predicted_oom([big]) == [big] and "predicted" not in foretell([big])
    synthetic.write(synthetic.cells(), out)
    assert "predicted to run out of memory" in foretell([big])
    small = Cell(1, job(output_dir=out), None)
    skipped, kept = without_predicted_oom([big, small])
    assert kept == small and skipped.obstacle.endswith("78 GiB free (skip_predicted_oom=true)")


def test_without_rows():
    said = describe([Cell(0, job(), None), Cell(1, job(device="cpu", tp_size=2, vocab=1000), None)])
    assert "predicted" not in said and "cpu, 2 ranks" in said and "0.5 min" in said


def test_expected_times(rows):
    known = Expectations(rows)
    assert known.seconds(job("triton_tp", vocab=32768, tp_size=1)) == 12.0
    assert known.seconds(job(tp_size=4)) == 40.0
    assert known.seconds(job(tp_size=16)) == 31.0


def test_nobody_knows_how_long_a_train_step_takes_that_did_not_run_before():
    train = parse_job({**MODEL, "variant": "fsdp", "model": "large", "tp_size": 1, "dp_size": 4, "device": "cpu"})
    said = describe([Cell(0, train, None)]).splitlines()
    assert "  unknown" in said[1] and said[-1] == "1 cell, 1 to run, of unknown length. Nothing was run."
    mixed = describe([Cell(0, train, None), Cell(1, job(), None)]).splitlines()[-1]
    assert "about 0.5 minutes one after the other, and 1 of unknown length. Nothing" in mixed
    known = Expectations(None)
    known.wall_s[train.key] = 120.0
    assert known.seconds(train) == 120.0


def test_what_is_known_of_gpus_is_not_expected_of_a_cpu(rows):
    assert Expectations(rows).seconds(job(tp_size=4, device="cpu", vocab=1000)) != 40.0


def test_expected_shortage(rows):
    known = Expectations(rows)
    big = job("pytorch_gather", tokens=65536)
    assert known.oom(big, 80.0) and known.oom(big, None) is None
    assert known.oom(job("pytorch_gather", tokens=65536, memory_limit_gib=20.0), None)
    assert known.oom(job("triton_tp", tokens=65536, block_cap=4096), 80.0) is None
    assert known.oom(job("pytorch_gather", tokens=65536, compute_dtype="logits"), 80.0) is None


def test_heads_are_the_reports():
    assert head(job("triton_tp", block_cap=4096)) == "triton_tp"
    assert head(job("pytorch_tp_manual", compile=True, graph=True)) == "pytorch_tp_manual compile=true graph=true"
