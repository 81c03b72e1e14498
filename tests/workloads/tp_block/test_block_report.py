"""The profile table and the timeline, from rows made up for it."""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tpbench.report import plots
from tpbench.report.command import main as report
from tpbench.report.layout import lay_out
from tpbench.report.plots import style, timeline
from tpbench.results.read import load
from tpbench.results.write import write_row
from tpbench.workloads.tp_block.report import main, markdown, problems

SIZES = {"hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8, "head_dim": 128, "part": "block", "tp_size": 4}
TRACE = {
    "timeline_start_ms": [0.0, 0.5, 0.6, 3.0],
    "timeline_ms": [0.4, 2.0, 1.0, 0.25],
    "timeline_kind": [2.0, 0.0, 1.0, 2.0],
    "timeline_lane": [0.0, 0.0, 1.0, 0.0],
}


def row(variant: str, number: int, **changes: Any) -> dict[str, Any]:
    moment = datetime.datetime(2026, 11, 21, 12, 0, number, tzinfo=datetime.UTC)
    made = {
        "workload": "tp_block", "variant": variant, "status": "ok", "device": "cuda", "gpu_name": "NVIDIA H200",
        "tokens": 8192, "dp_size": 1, "dtype": "bfloat16", "save_gathered": True, "signals": "stream", "seed": 0,
        "time_ms": 9.0, "device_ms": 8.0 + number, "forward_ms": 3.0, "backward_ms": 5.0, "loss_value": -0.5,
        "grad_norm": 19.25, "exposed_ms": 0.5, "hidden_share": 0.75, "peak_gib": 1.5, "interpreted": False,
        "key": f"{variant}{number}", "started_at": moment, "finished_at": moment, **SIZES, **TRACE,
    }  # fmt: skip
    return made | changes


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


def test_the_table_has_a_line_for_each_variant_and_option(rows: Path) -> None:
    long, short = markdown(load(rows)).split("\n\n")[1::2][::-1]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in long.splitlines()]
    heads, cells = lines[0], {line[0]: dict(zip(lines[0], line, strict=True)) for line in lines[2:]}
    assert heads[1:7] == ["loss", "gradient norm", "forward ms", "backward ms", "step ms", "exposed ms"]
    assert list(cells) == ["block_no_tp", "block_tp", "block_tp save_gathered=false", "block_symm_mem", "block_auto"]
    assert cells["block_tp"]["step ms"] == "18.000" and cells["block_auto"]["hidden"] == "82%"
    assert cells["block_no_tp"]["hidden"] == "-" and cells["block_symm_mem"]["loss"] == "skipped"
    assert cells["block_tp"]["peak GiB"] == "1.5" and "overlapped" not in heads
    assert short.count("\n") == 2


def test_problems_with_another_length_stand_apart(rows: Path) -> None:
    assert [dict(zip(("tokens", "tp"), key[-2:], strict=True)) for key in problems(load(rows))] == [
        {"tokens": 2048, "tp": 4},
        {"tokens": 8192, "tp": 4},
    ]


@pytest.mark.parametrize(("form", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_the_timeline_is_drawn_from_rows(rows: Path, tmp_path: Path, form: str, start: bytes) -> None:
    for name, command in {
        "one": lambda file: main([str(rows), "--only", "tokens=8192", "--timeline", file]),
        "other": lambda file: report([str(rows), "--format", form, "--plot", "timeline", "-o", file]),
    }.items():
        file = tmp_path / f"{name}.{form}"
        assert command(str(file)) == 0
        assert file.read_bytes().startswith(start)
        if form == "svg":
            text = file.read_text()
            for said in ("block_tp, 3.25 ms", "block_auto, 3.25 ms", "communication", "tokens=8192"):
                assert said in text
            assert "block_symm_mem" not in text and "block_tp save_gathered" not in text


def test_its_bars_are_the_intervals(rows: Path) -> None:
    (section,) = lay_out(load(rows), plots.NEEDS).sections
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
        (["--timeline", "x.svg"], "of one problem: choose with --only NAME=VALUE among\n  dtype=bfloat16 part=block"),
        (["--timeline", "x.gif", "--only", "tokens=2048"], "must end in .png or .svg"),
        (["--timeline", "x.svg", "--only", "variant=block_symm_mem"], "no row of these has a traced step"),
        (["--only", "tokens=1"], "no tokens is called 1 (valid: 2048, 8192)"),
        (["--only", "token=1"], "no column is called token, did you mean tokens?"),
    ],
)
def test_what_cannot_be_answered(
    rows: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main([str(rows), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_the_page_draws_what_its_tables_leave_out(rows: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert report([str(rows), "--format", "html", "-o", str(page)]) == 0
    text = page.read_text()
    assert "A step of one problem, by stream" in text
    assert not re.search(r"<th[^>]*>\s*timeline_", text) and "[0.4, 2.0" not in text


def test_rows_of_others_are_no_matter(rows: Path) -> None:
    frame = load(rows)
    others = frame.assign(workload="entropy_loss")
    assert markdown(pd.concat([frame, others])) == markdown(frame)
