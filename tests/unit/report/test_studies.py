"""Tables with a line for each cell: studies and chosen columns, also of cells that failed; and pictures of studies."""

import pytest

from tests.support.commands import report as main
from tpbench.report.studies import study_document, study_picture
from tpbench.settings import JobError
from tpbench.tables import as_csv
from tpbench.workloads.study_data import Series

FAST = {"device_ms": 0.148, "fraction_of_floor": 0.857, "registers": 40, "spilled_bytes": 0, "occupancy": 0.5}
SLOW = {"device_ms": 0.9, "fraction_of_floor": 0.14, "registers": 64, "spilled_bytes": 168, "occupancy": 0.25}
TRAINED = {"workload": "train_step", "loss": None, "block_cap": None, "vocab": None, "model": "qwen3_8b"}
BLOCK = {"workload": "tp_block", "hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8, "head_dim": 128,
         "part": "block", "save_gathered": True, "loss": None, "vocab": None}  # fmt: skip


@pytest.fixture
def caps(add):
    add("triton_tp", 0.2, algorithm="two_reads", block_cap="4096", **FAST)
    add("triton_tp", 1.0, algorithm="two_reads", block_cap="32768", **SLOW)
    add("triton_tp", algorithm="two_reads", block_cap="16384", status="oom", reason="no room")
    add("triton_tp", 7.0, algorithm="two_kernels", block_cap="4096", interpreted=True, device="cpu", gpu_name=None)
    add("pytorch_gather", 1.7, compile=True)


def test_a_study_has_a_line_for_each_cell(caps, frame):
    gpu, cpu = study_document(frame(), "block_cap").tables
    assert tuple(gpu.columns) == (
        "variant", "status", "of best", "time_ms", "device_ms", "fraction_of_floor",
        "registers", "spilled_bytes", "occupancy",
    )  # fmt: skip
    assert {line[0]: " ".join(line[1:]) for line in gpu.texts} == {
        "triton_tp block_cap=4096 algorithm=two_reads": "ok† 1.00x 0.200 0.148 85.7% 40 0 50.0%",
        "triton_tp block_cap=16384 algorithm=two_reads": "oom - - - - - - -",
        "triton_tp block_cap=32768 algorithm=two_reads": "ok 6.08x 1.000 0.900 14.0% 64 168 25.0%",
        "pytorch_gather compile=true": "ok - 1.700 - - - - -",
    }
    assert "no measurement" in cpu.notes[0] and gpu.notes[0].startswith("† host-bound")


def test_what_a_late_rank_costs_by_problem_and_variant(add, frame):
    late = {"tp_size": 2, "late_ms": [0.11, 0.11, 0.12, 0.13], "beside_alone_ms": 0.5}
    add("triton_tp", 0.2, beside_ms=[0.6, 0.7, 0.9, 1.5], exchange="symmetric", **late)
    add("triton_tp", 0.3, exchange="nccl", **late)
    add("triton_tp", 0.3, tp_size=4)
    (table,) = study_document(frame(), "late").tables
    assert [line[-3:] for line in table.texts] == [
        ["0.110, 0.110, 0.120, 0.130", "0.500", beside] for beside in ("-", "0.600, 0.700, 0.900, 1.500")
    ]


def test_a_computed_study_has_correct_measurements_only(add, frame):
    add("dense_reduce_scatter", 0.2, workload="embedding_grad", interpreted=True, device="cpu", gpu_name=None)
    add("dense_all_reduce", 0.2, workload="embedding_grad", status="wrong", reason="output_error")
    left_out = "without the rows of Triton's interpreter, which measure nothing: 1"
    with pytest.raises(JobError, match=f"do not suffice for the study crossover, .*, {left_out}"):
        study_document(frame(), "crossover")


def test_columns_and_ratios_of_each_cell(add, frame):
    add("triton_tp", 0.2, device_ms=0.1, fraction_of_floor=0.857, peak_gib=2.0)
    add("pytorch_gather", 1.7, device_ms=1.7, vocab=65536)
    add("pytorch_gather", vocab=32768, status="oom", reason="no room")
    columns = ("time_ms", "time_ms/device_ms", "fraction_of_floor", "peak_gib/device_ms")
    (table,) = study_document(frame(), None, columns).tables
    assert tuple(table.columns) == ("vocab", "shard", "variant", "status", *columns)
    assert table.texts == [
        ["32768", "16384", "triton_tp", "ok†", "0.200", "2.00x", "85.7%", "20.0x"],
        ["32768", "16384", "pytorch_gather", "oom", "-", "-", "-", "-"],
        ["65536", "32768", "pytorch_gather", "ok", "1.700", "1.00x", "-", "-"],
    ]
    assert table.heading.endswith(", tp=2") and table.facts["tp"] == 2
    (table,) = study_document(frame(), None, ("status", "peak_gib")).tables
    assert tuple(table.columns) == ("vocab", "shard", "variant", "status", "peak_gib")


def test_a_mark_belongs_to_the_columns_that_are_shown(add, frame):
    """† belongs to wall times, § to memory with that of CUDA graphs. CSV names them apart from the status."""
    add("block_symm_mem", 1.0, **BLOCK, device_ms=0.5, peak_gib=0.0, graph_gib=0.5)
    for columns, marks in {
        ("device_ms",): "", ("device_ms", "time_ms"): "†", ("peak_gib",): "§", ("peak_gib/time_ms",): "†§",
    }.items():  # fmt: skip
        (table,) = study_document(frame(), None, columns).tables
        assert "status" not in table.columns
        assert [note[:12] for note in table.notes] == [f"All cells: {mark}" for mark in marks]
    add("block_tp", 1.0, **BLOCK, device_ms=1.0, peak_gib=1.0, tokens=1)
    document = study_document(frame(), None, ("device_ms", "time_ms"))
    assert sorted(line[2] for line in document.tables[0].texts) == ["ok", "ok†"]
    assert ",ok," in as_csv(document) and "status: host-bound" in as_csv(document)


def test_the_picture_of_block_caps_has_a_line_for_each_algorithm(add, frame):
    for cap, device_ms in ((16384, 0.3), (4096, 0.2)):
        add("triton_tp", 1.0, algorithm="two_reads", block_cap=str(cap), block_used=cap, device_ms=device_ms)
    (panel,) = study_picture(frame(), "block_cap").panels
    (series,) = panel.lines
    assert (series.label, series.points) == ("triton_tp algorithm=two_reads", ((4096.0, 0.2), (16384.0, 0.3)))


def test_with_a_study_cells_are_compared_and_other_workloads_left_out(add, frame):
    add("triton_tp", 0.2)
    for variant, tokens in (("fsdp", 9000.0), ("ddp", 4500.0)):
        add(variant, 1.0, tokens_per_s_per_gpu=tokens, mfu=0.5, **TRAINED)
    (table,) = study_document(frame(), "training", ("mfu",)).tables
    assert tuple(table.columns) == ("variant", "of best", "mfu")
    assert table.texts == [["fsdp", "1.00x", "50.0%"], ["ddp", "2.00x", "50.0%"]]
    assert len(study_document(frame(), None, ("time_ms",)).tables) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--study", "block_caps"], "no study is called block_caps, did you mean block_cap?"),
        (["--study", "profile", "--format", "svg"], "the study profile has no picture"),
        (
            ["--study", "block_cap", "--format", "html", "-o", "x"],
            "--columns and --study make tables: choose --format text, markdown, csv, json",
        ),
        (["--study", "block_cap", "--workload", "embedding_grad"], "no rows for the study block_cap, which is of entr"),
        (["--columns", "time_ms", "--format", "html"], "--columns and --study make tables"),
        (["--columns", "time_ms", "--study", "training"], "no rows for the study training, which is of train_step"),
        (["--columns", "registers,mfu"], "these rows have no registers and no mfu"),
    ],
)
def test_impossible_requests_are_explained(add, tmp_path, capsys, arguments, message):
    add("triton_tp", 1.0)
    add("dense_reduce_scatter", 1.0, workload="embedding_grad")
    assert main([str(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().err


def train(add, variant, dp_size, tp_size, **columns):
    add(variant, 1.0, dp_size=dp_size, tp_size=tp_size, **TRAINED | columns)


def test_a_picture_has_a_panel_for_each_problem_and_number_of_ranks(add, frame):
    train(add, "fsdp", 2, 1, peak_gib=80.0, tokens_per_s_per_gpu=9.0)
    train(add, "autotp", 1, 2, peak_gib=60.0, tokens_per_s_per_gpu=7.0)
    train(add, "ddp", 4, 1, peak_gib=90.0, tokens_per_s_per_gpu=8.0)
    train(add, "autotp", 4, 1, status="oom", peak_gib=140.0, tokens_per_s_per_gpu=1.0)
    train(add, "fsdp", 4, 1, peak_gib=70.0)
    two, four = study_picture(frame(), "training").panels
    assert two.lines == (
        Series("autotp", ((60.0, 7.0),), texts=("1 x 2",)),
        Series("fsdp", ((80.0, 9.0),), texts=("2 x 1",)),
    )
    assert four.lines == (Series("ddp", ((90.0, 8.0),), texts=("4 x 1",)),)  # without the failed cell and the empty one
    assert two.title.replace("\n", " ").endswith("2 ranks") and "model=qwen3_8b" in two.title


def test_the_report_draws_a_picture_or_says_why_not(add, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    train(add, "ddp", 4, 1)
    file = tmp_path / "training.svg"
    command = [str(tmp_path), "--study", "training", "-o", str(file)]
    assert main(command) == 2 and "nothing to draw for the study training" in capsys.readouterr().err
    train(add, "autotp", 1, 2, peak_gib=60.0, tokens_per_s_per_gpu=7.0)
    assert main(command) == 0
    assert all(word in file.read_text() for word in (">1 x 2<", "peak_gib (beside a point: dp x tp)", ">autotp<"))
