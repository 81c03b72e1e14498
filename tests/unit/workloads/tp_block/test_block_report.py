"""The profile table and the timeline, drawn from synthetic rows."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import pytest

from tests.support.tp_block_rows import TRACE, row
from tpbench.report import plots
from tpbench.report.analysis.grid import arrange_rows
from tpbench.report.command import main as report
from tpbench.report.plots import style, timeline
from tpbench.results.read import load
from tpbench.results.write import write_row


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    nothing = dict.fromkeys(("time_ms", "device_ms", "loss_value", *TRACE))
    made = [
        row("block_tp", 9, device_ms=99.0),  # older than the next
        row("block_tp", 10),
        row("block_tp", 11, save_gathered=False, **dict.fromkeys(TRACE)),
        row("block_auto", 12, hidden_share=0.815),
        row("block_no_tp", 13, hidden_share=None, exposed_ms=None),
        row("block_symm_mem", 14, status="skipped", reason="needs a CUDA GPU", **nothing),
        row("block_tp", 15, tokens=2048, device_ms=2.0),
    ]
    for index, each in enumerate(made):
        write_row(each, folder, f"r{index}")
    return folder


def test_the_study_has_a_line_for_each_variant_and_option(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report([str(rows), "--study", "profile", "--only", "tokens=8192", "--format", "csv"]) == 0
    lines = {line["variant"]: line for line in csv.DictReader(io.StringIO(capsys.readouterr().out))}
    options = {"block_tp", "block_tp save_gathered=false"}
    assert set(lines) == {"block_no_tp", "block_symm_mem", "block_auto"} | options
    assert lines["block_tp"]["device_ms"] == "18.0"
    assert lines["block_tp"]["of best"] == "1.0" and float(lines["block_no_tp"]["of best"]) == pytest.approx(1.17, 0.01)
    assert lines["block_auto"]["hidden_share"].startswith("0.81") and lines["block_no_tp"]["hidden_share"] == ""
    assert lines["block_symm_mem"]["status"] == "skipped" and "overlap_fraction" not in lines["block_auto"]


@pytest.mark.parametrize(("form", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_the_timeline_is_drawn_from_rows(rows: Path, tmp_path: Path, form: str, start: bytes) -> None:
    file = tmp_path / f"step.{form}"
    assert report([str(rows), "--only", "tokens=8192", "--format", form, "--plot", "timeline", "-o", str(file)]) == 0
    assert file.read_bytes().startswith(start)
    if form == "svg":
        text = file.read_text()
        for said in ("block_tp, 3.25 ms", "block_auto, 3.25 ms", "communication", "tokens=8192"):
            assert said in text
        assert "block_symm_mem" not in text and "block_tp save_gathered=false" not in text


def test_its_bars_are_the_intervals(rows: Path) -> None:
    (section,) = arrange_rows(load(rows), plots.COLUMNS).grids
    with style.drawing("test"):
        figure = timeline.draw(section)
    assert figure is not None
    first = figure.axes[0]
    spans = [
        tuple(round(float(value), 3) for value in (box.x0, box.x1 - box.x0, (box.y0 + box.y1) / 2))
        for collection in first.collections
        for box in (path.get_extents() for path in collection.get_paths())
    ]
    assert sorted(spans) == [(0.0, 0.4, 0.0), (0.5, 2.0, 0.0), (0.6, 1.0, 1.0), (3.0, 0.25, 0.0)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--format", "svg", "--plot", "timeline", "-o", "x.svg", "--only", "variant=block_symm_mem"],
            "these rows have nothing for the plot timeline",
        ),
        (["--only", "tokens=1"], "no tokens is called 1 (valid: 2048, 8192)"),
        (["--only", "token=1"], "no column is called token, did you mean tokens?"),
    ],
)
def test_requests_without_an_answer(
    rows: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert report([str(rows), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_the_page_draws_what_its_tables_leave_out(rows: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert report([str(rows), "--format", "html", "-o", str(page)]) == 0
    text = page.read_text()
    assert "A step of one problem, by stream" in text
    assert not re.search(r"<th[^>]*>\s*timeline_", text) and "[0.4, 2.0" not in text
