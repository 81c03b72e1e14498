"""The picture of a study: a point for each measured cell, in a panel for each problem and number of ranks."""

import pytest

from tests.unit.report.test_columns import TRAINED
from tpbench.report.command import main
from tpbench.report.studies import study_picture
from tpbench.workloads.study_data import Series


@pytest.fixture
def trained(add):
    for variant, dp, tp, gib, speed in (
        ("fsdp", 2, 1, 80.0, 9.0),
        ("autotp", 1, 2, 60.0, 7.0),
        ("ddp", 4, 1, 90.0, 8.0),
    ):
        add(variant, 1.0, dp_size=dp, tp_size=tp, peak_gib=gib, tokens_per_s_per_gpu=speed, **TRAINED)
    add("autotp", dp_size=4, tp_size=1, status="oom", peak_gib=140.0, tokens_per_s_per_gpu=1.0, **TRAINED)
    add("fsdp", 1.0, dp_size=4, tp_size=1, peak_gib=70.0, tokens_per_s_per_gpu=None, **TRAINED)


def test_cells_of_one_problem_and_number_of_ranks_share_a_panel(trained, add, frame):
    two, four = study_picture(frame(), "training").panels
    assert two.lines == (
        Series("autotp", ((60.0, 7.0),), texts=("1 x 2",)),
        Series("fsdp", ((80.0, 9.0),), texts=("2 x 1",)),
    )
    assert four.lines == (Series("ddp", ((90.0, 8.0),), texts=("4 x 1",)),)  # neither the failed cell nor the empty one
    assert two.title.replace("\n", " ").endswith("2 ranks") and "model=qwen3_8b" in two.title
    add("fsdp", 1.0, dp_size=2, tp_size=1, peak_gib=9.0, tokens_per_s_per_gpu=8.0, **{**TRAINED, "model": "qwen3_14b"})
    assert len(study_picture(frame(), "training").panels) == 3


def test_meshes_of_another_batch_size_share_the_panel_and_name_it(add, frame):
    for variant, dp, tp, batch in (("fsdp", 2, 1, 1), ("autotp", 1, 2, 1), ("autotp", 1, 2, 2)):
        speeds = {"peak_gib": 80.0, "tokens_per_s_per_gpu": 9.0}
        add(variant, 1.0, dp_size=dp, tp_size=tp, batch_size=batch, **speeds, **TRAINED)
    picture = study_picture(frame(), "training")
    (panel,) = picture.panels
    assert {line.label: line.texts for line in panel.lines} == {
        "autotp": ("1 x 2 x 1", "1 x 2 x 2"),
        "fsdp": ("2 x 1 x 1",),
    }
    assert picture.x_label == "peak_gib (beside a point: dp x tp x batch_size)"


@pytest.mark.parametrize(("form", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_the_report_draws_it(trained, tmp_path, form, start):
    pytest.importorskip("matplotlib")
    file = tmp_path / f"training.{form}"
    assert main([str(tmp_path), "--study", "training", "--format", form, "-o", str(file)]) == 0
    assert file.read_bytes().startswith(start)
    if form == "svg":
        text = file.read_text()
        assert all(word in text for word in (">1 x 2<", ">4 x 1<", "peak_gib (beside a point: dp x tp)", ">autotp<"))


def test_rows_without_points_are_explained(add, tmp_path, capsys):
    add("ddp", 1.0, **TRAINED)
    assert main([str(tmp_path), "--study", "training", "--format", "svg"]) == 2
    assert "nothing to draw for the study training" in capsys.readouterr().err
