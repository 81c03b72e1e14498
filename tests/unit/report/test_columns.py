"""Chosen columns of each cell, and ratios of two columns."""

import csv
import io

import pyarrow.parquet as pq
import pytest

from tpbench.report.command import main
from tpbench.report.studies import column_tables, parse_columns
from tpbench.settings import JobError

TRAINED = {"workload": "train_step", "loss": None, "block_cap": None, "vocab": None, "model": "qwen3_8b"}


@pytest.fixture
def cells(add):
    add("triton_tp", 0.2, device_ms=0.1, fraction_of_floor=0.857, peak_gib=2.0)
    add("pytorch_gather", 1.7, device_ms=1.7, vocab=65536)
    add("pytorch_gather", vocab=32768, status="oom", reason="no room")


def test_a_line_for_each_cell_with_the_columns_and_ratios(cells, frame):
    (table,) = column_tables(frame(), ("time_ms", "time_ms/device_ms", "fraction_of_floor", "peak_gib/device_ms"))
    assert table.columns == (
        "vocab", "shard", "variant", "status", "time_ms", "time_ms/device_ms", "fraction_of_floor",
        "peak_gib/device_ms",
    )  # fmt: skip
    assert table.rows == (
        ("32768", "16384", "triton_tp", "ok†", "0.200", "2.00x", "85.7%", "20.0x"),
        ("32768", "16384", "pytorch_gather", "oom", "-", "-", "-", "-"),
        ("65536", "32768", "pytorch_gather", "ok", "1.700", "1.00x", "-", "-"),
    )
    assert table.heading.endswith(", tp=2") and table.facts["tp"] == "2"


def test_older_rows_have_no_time_of_launches(add, frame, tmp_path, capsys):
    add("triton_tp", 0.2, launch_ms=0.05)
    add("pytorch_gather", 1.7)
    file = tmp_path / "rows" / "r1.parquet"
    older = pq.read_table(file).drop_columns(["launch_ms"])
    pq.write_table(older, file)
    (table,) = column_tables(frame(), ("launch_ms", "time_ms/launch_ms"))
    assert table.rows == (("triton_tp", "0.05", "4.00x"), ("pytorch_gather", "-", "-"))
    assert main([str(tmp_path), "--metric", "launch_ms"]) == 0
    assert "ok: correct, but without launch_ms" in capsys.readouterr().out


def test_a_lone_correct_cell_has_no_status_and_all_keys_in_its_heading(add, frame):
    add("triton_tp", 0.2)
    (table,) = column_tables(frame(), ("time_ms", "registers"))
    assert (table.columns, table.rows) == (("variant", "time_ms"), (("triton_tp", "0.200"),))
    assert "vocab=32768, tp=2, shard=16384" in table.heading


def test_an_interpreted_cell_is_marked(add, frame):
    add("triton_tp", 0.2, interpreted=True, device="cpu", gpu_name=None)
    (table,) = column_tables(frame(), ("time_ms",))
    assert table.rows == (("triton_tp", "ok*", "0.200"),) and "no measurement" in table.notes[0]


def test_with_a_study_cells_are_compared_and_other_workloads_left_out(cells, add, frame):
    for variant, tokens in (("fsdp", 9000.0), ("ddp", 4500.0)):
        add(variant, 1.0, tokens_per_s_per_gpu=tokens, mfu=0.5, **TRAINED)
    (table,) = column_tables(frame(), ("mfu",), "training")
    assert table.columns == ("variant", "of best", "mfu")
    assert table.rows == (("fsdp", "1.00x", "50.0%"), ("ddp", "2.00x", "50.0%"))
    assert len(column_tables(frame(), ("time_ms",))) == 2


@pytest.mark.parametrize("name", ["tim", "time_ms/devise_ms", "a/time_ms", ""])
def test_an_unknown_column_is_an_error(name):
    with pytest.raises(JobError, match=r"no column is called .* \(all \d+: outputs/SCHEMA.md\)"):
        parse_columns(f"time_ms,{name}")


@pytest.mark.parametrize("form", ["text", "markdown", "csv"])
def test_every_format_has_them(cells, tmp_path, capsys, form):
    assert main([str(tmp_path), "--columns", "time_ms,time_ms/device_ms", "--format", form]) == 0
    printed = capsys.readouterr().out
    assert "2.00x" in printed and "65536" in printed
    if form == "csv":
        rows = list(csv.DictReader(io.StringIO(printed)))
        assert [row["time_ms/device_ms"] for row in rows] == ["2.00x", "", "1.00x"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--columns", "time_ms", "--format", "html"], "--columns is for --format text, markdown, csv"),
        (["--columns", "time_ms", "--study", "training"], "no rows for the study training, which is of train_step"),
        (["--columns", "registers,mfu"], "these rows have no registers and no mfu"),
    ],
)
def test_impossible_requests_are_explained(cells, tmp_path, capsys, arguments, said):
    assert main([str(tmp_path), *arguments]) == 2
    assert said in capsys.readouterr().err
