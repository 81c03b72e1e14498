"""A study shows several numbers of each cell, also of cells that failed."""

import csv
import io

import pytest

from tests.unit.report.test_render import HOSTILE
from tpbench.report.command import main
from tpbench.report.page.html_page import page
from tpbench.report.studies import study_tables

FAST = {"device_ms": 0.148, "fraction_of_floor": 0.857, "registers": 40, "spilled_bytes": 0, "occupancy": 0.5}
SLOW = {"device_ms": 0.9, "fraction_of_floor": 0.14, "registers": 64, "spilled_bytes": 168, "occupancy": 0.25}


@pytest.fixture
def caps(add):
    add("triton_tp", 0.2, algorithm="two_reads", block_cap="4096", **FAST)
    add("triton_tp", 1.0, algorithm="two_reads", block_cap="32768", **SLOW)
    add("triton_tp", algorithm="two_reads", block_cap="16384", status="oom", reason="no room")
    add("triton_tp", 7.0, algorithm="two_kernels", block_cap="4096", interpreted=True, device="cpu", gpu_name=None)
    add("pytorch_gather", 1.7, compile=True)


def test_a_line_for_each_cell(caps, frame):
    gpu, cpu = study_tables(frame(), "block_cap")
    assert gpu.columns == (
        "vocab", "tp", "shard", "variant", "status", "of best", "time_ms", "device_ms", "fraction_of_floor",
        "registers", "spilled_bytes", "occupancy",
    )  # fmt: skip
    lines = {line[3]: line[4:] for line in gpu.rows}
    assert lines == {
        "triton_tp block_cap=4096 algorithm=two_reads": ("ok†", "1.00x", "0.200", "0.148", "85.7%", "40", "0", "50.0%"),
        "triton_tp block_cap=16384 algorithm=two_reads": ("oom", *"-------"),
        "triton_tp block_cap=32768 algorithm=two_reads": (
            "ok",
            "6.08x",
            "1.000",
            "0.900",
            "14.0%",
            "64",
            "168",
            "25.0%",
        ),
        "pytorch_gather compile=true": ("ok", "-", "1.700", *"-----"),
    }
    assert cpu.rows[0][4] == "ok*" and "no measurement" in cpu.notes[0] and gpu.notes[0].startswith("† host-bound")


@pytest.mark.parametrize("form", ["text", "markdown", "csv"])
def test_every_format_has_every_cell(caps, tmp_path, capsys, form):
    assert main([str(tmp_path), "--study", "block_cap", "--format", form]) == 0
    printed = capsys.readouterr().out
    assert printed.count("triton_tp block") == 4 and "85.7%" in printed and "168" in printed
    if form == "csv":
        rows = list(csv.DictReader(io.StringIO(printed)))
        assert [row["registers"] for row in rows] == ["40", "", "64", "", ""]


def test_the_page_has_the_study_of_a_varying_option(caps, add, frame):
    assert 'data-name="study block_cap"' in page(frame())
    assert "168" in page(frame()).split("study block_cap")[1]


def test_the_page_has_no_study_of_a_fixed_option(add, frame):
    add("triton_tp", 1.0, block_cap="4096")
    assert "study block_cap" not in page(frame())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--study", "block_caps"], "no study is called block_caps, did you mean block_cap?"),
        (["--study", "block_cap", "--format", "svg"], "the study block_cap has no picture"),
        (
            ["--study", "block_cap", "--format", "html", "-o", "x"],
            "--study is for --format text, markdown, csv, png, svg",
        ),
        (
            ["--study", "block_cap", "--workload", "embedding_grad"],
            "no rows for the study block_cap, which is of entropy",
        ),
    ],
)
def test_impossible_studies_are_explained(add, tmp_path, capsys, arguments, said):
    add("triton_tp", 1.0)
    add("dense_all_reduce", 1.0, workload="embedding_grad")
    assert main([str(tmp_path), *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("form", ["text", "markdown", "csv"])
def test_text_of_a_row_is_harmless(add, tmp_path, capsys, form):
    add(HOSTILE, 1.0, algorithm=HOSTILE)
    assert main([str(tmp_path), "--study", "block_cap", "--format", form]) == 0
    printed = capsys.readouterr().out
    assert not {"\x1b", "\x07", "\u202e", "\r"} & set(printed)
    if form == "markdown":
        assert "<script>" not in printed and "**b**" not in printed
    if form == "csv":
        cells = [value for row in csv.DictReader(io.StringIO(printed)) for value in row.values()]
        assert any("cmd" in value for value in cells) and not any(value.startswith("=") for value in cells)
