"""Text of a dry run."""

from datetime import UTC, datetime

from tests.support import synthetic
from tests.support.planned_jobs import job, train_job
from tpbench.launcher.planning.forecast import dry_run_text
from tpbench.launcher.planning.plan import Cell, ThisHost
from tpbench.launcher.planning.resume import decide

HOST = ThisHost(4)


def text(*cells):
    return dry_run_text(cells, {}, HOST)


def test_a_gather_runs_out_of_memory_on_another_gpu():
    """22 GiB are too little for 65536 tokens of 151936 columns. A job that shares processes starts none."""
    large = {"tokens": 65536, "vocab": 151936, "tp_size": 4}
    cells = [
        Cell(at, job(variant, **large, **limit), None)
        for at, (variant, limit) in enumerate([
            ("pytorch_gather", {"memory_limit_gib": 22}), ("pytorch_gather", {}), ("triton_tp", {}),
            ("triton_tp", {"seed": 1}),
        ])
    ]  # fmt: skip
    lines = dry_run_text(cells, {}, ThisHost(8, gpu="H100"), reuse=True).splitlines()
    assert ["runs out of memory: a rank needs at least " in line for line in lines[1:5]] == [True, True, False, False]
    assert "21.8 GiB free" in lines[1] and "77.2 GiB free" in lines[2] and lines[3].endswith("0.1 min")


class SmallGpus(ThisHost):
    """A host with four GPUs of 10 GiB."""

    def memory_gib(self):
        return 10.0, None


def test_a_plan(tmp_path):
    cells = [
        Cell(0, job(output_dir=str(tmp_path)), None),
        Cell(1, job(tokens=2**18, tp_size=2), None),
        Cell(2, job(tp_size=8), skip_reason="needs 8 GPUs, found 4"),
    ]
    of_cell = {"key": cells[0].job.key, "job": None, "wall_s": 30.0, "start_s": None, "interleaved_cells": None}
    synthetic.write([next(iter(synthetic.cells())) | of_cell], tmp_path)
    lines = dry_run_text(cells, {}, SmallGpus(4)).splitlines()
    assert "4 GPUs" in lines[1] and lines[1].endswith("0.5 min")
    assert "runs out of memory: a rank needs at least 32 GiB, 8 GiB free" in lines[2]
    assert lines[3].endswith("skipped: needs 8 GPUs, found 4")
    assert lines[-1] == "3 cells, 2 to run, about 1.1 min one after the other. Nothing was run."


def test_without_rows():
    lines = text(Cell(0, job(), None), Cell(1, job(device="cpu", tp_size=2, vocab=1000), None))
    assert "predicted" not in lines and "cpu, 2 ranks" in lines and "0.3 min" in lines


def test_an_unknown_time_is_not_part_of_the_total():
    lines = text(Cell(0, train_job(), None)).splitlines()
    assert "  unknown" in lines[1] and lines[-1] == "1 cell, 1 to run, 1 of unknown length. Nothing was run."
    total = text(Cell(0, train_job(), None), Cell(1, job(), None)).splitlines()[-1]
    assert "about 0.6 min one after the other, 1 of unknown length. Nothing" in total


def test_a_plan_to_resume_shows_which_cells_run_and_why(tmp_path):
    cells = [Cell(index, job(seed=index, output_dir=str(tmp_path)), None) for index in range(3)]
    assert {each.reason for each in decide(cells, {}).values()} == {"missing: has no row yet"}
    of_cell = {"key": cells[0].job.key, "job": None, "kernels_version": cells[0].job.kernels_version}
    fields = {**of_cell, "status": "ok", "finished_at": datetime.now(UTC)}
    synthetic.write([{**row, **fields} for row in list(synthetic.cells())[:1]], tmp_path)
    lines = dry_run_text(cells[:2], decide(cells, {}), HOST).splitlines()
    assert lines[1].endswith("  measured before")
    assert lines[2].endswith("0.6 min  missing: has no row yet")
    assert lines[-1].startswith("2 cells, 1 to run, about ")
    nothing = dry_run_text(cells[:1], decide(cells, {}), HOST).splitlines()[-1]
    assert nothing == "1 cell, 0 to run. Nothing was run."
