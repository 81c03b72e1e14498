"""Tables of a page: verdicts, machines, and those of a section. And JSON documents."""

import json

import pytest

from tpbench.report import command
from tpbench.report.analysis.grid import arrange_rows
from tpbench.report.analysis.verdicts import verdicts_of
from tpbench.report.page.html_page import failure_table, machines, verdict_table
from tpbench.report.pivot import failures
from tpbench.settings import JobError
from tpbench.workloads import workloads


@pytest.fixture
def grids(add, frame):
    """Two measured cells and one that failed, on one host."""
    samples = [1.0 + 0.01 * at for at in range(20)] + [9.0]
    for variant, factor in (("triton_tp", 1), ("pytorch_gather", 3)):
        add(
            variant, 2.0 * factor, device_ms=1.0 * factor, device_samples_ms=[factor * each for each in samples],
            samples_ms=[factor * (each + 1) for each in samples], skew_ms=0.5, time_ci_low_ms=1.9, time_ci_high_ms=2.1,
            gb_per_s=10.0 / factor, fraction_of_floor=0.5, peak_gib=0.0004, host="a", gpu_count=4,
        )  # fmt: skip
    add("quack", status="oom", reason="asked for 4 GiB", log_dir="sweeps/x", host="a", gpu_count=4)
    return arrange_rows(frame())


def test_a_verdict_has_its_time_the_runner_up_and_doubts(grids):
    table = verdict_table(verdicts_of(grids[0]))
    assert dict(zip(table.columns, table.texts[0], strict=True)) == {
        "problem": "vocab=32768 tp=2", "fastest": "triton_tp", "time": "1.000 ms", "runner-up": "3.00x pytorch_gather",
        "of floor": "50%", "memory": "0.0004 GiB", "wall time": "2.000 ms", "trust": "good",
    }  # fmt: skip


def test_machines_and_failures_of_all_rows(grids):
    facts = dict(machines([record for grid in grids for record in grid.records]).texts)
    assert facts["gpu_name"] == "NVIDIA H200 (3)" and facts["gpu_count"] == "4 (3)" and "git_commit" not in facts
    assert failure_table(failures(grids)).texts == [["1", "oom", "asked for 4 GiB", "quack vocab=32768 tp=2"]]


def test_documents_of_equal_names_get_the_id_of_their_row(add, frame, tmp_path, monkeypatch):
    def document(row):
        return (row["variant"], {"time": row["time_ms"]}) if row["seed"] else None

    monkeypatch.setattr(workloads()["entropy_loss"], "document", document)
    for variant, seed, time in (("triton_tp", 1, 1.0), ("triton_tp", 2, 2.0), ("quack", 3, 1.0), ("quack", 0, 9.0)):
        add(variant, time, seed=seed)
    command.write_documents(frame(), tmp_path / "new/folder")
    assert sorted(file.name for file in (tmp_path / "new/folder").iterdir()) == [
        "quack.json",
        "triton_tp.json",
        "triton_tp_r1.json",
    ]
    assert json.loads((tmp_path / "new/folder/triton_tp_r1.json").read_text()) == {"time": 2.0}
    with pytest.raises(JobError, match="none of these rows is a correct row"):
        command.write_documents(frame()[lambda rows: rows["seed"] == 0], tmp_path)
