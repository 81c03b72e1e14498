"""Cells and tables of a page: texts, numbers to sort by, and classes."""

import dataclasses
import json
import math
import re

import pytest
from tpbench.report.json_documents import write_documents
from tpbench.report.page.cells import MISSING_CELL, PageCell, PageTable, percentage, quantity, words

from tests.unit.report.test_compare_changes import pair, record, slower
from tpbench.report import json_documents
from tpbench.report.analysis.grid import arrange_rows
from tpbench.report.analysis.metrics import metric
from tpbench.report.analysis.ratios import CLOCKS
from tpbench.report.compare import render
from tpbench.report.compare.changes import compare_cells
from tpbench.report.page.tables import (
    _MEASURES,
    complete_table,
    distribution_table,
    failure_table,
    pivot_table,
    speedup_table,
)
from tpbench.report.plots import timeline
from tpbench.settings import JobError
from tpbench.workloads import workloads


def test_cells_have_a_text_and_the_number_behind_it():
    assert quantity(1.23456, "ms") == PageCell("1.235 ms", 1.23456) and quantity(2, kind="best") == PageCell(
        "2.000", 2.0, "best"
    )
    assert percentage(0.1234) == PageCell("12.3%", 0.1234)
    assert words(7) == PageCell("7", 7.0) and words(True) == PageCell("true") and words("a\nb") == PageCell("a b")
    assert quantity(None) is percentage(None) is words(None) is MISSING_CELL
    assert len(words("x" * 3000).text) < 250 < len(words("x" * 3000, 2000).text)


@pytest.mark.parametrize(
    ("digits", "cell", "number"),
    [
        ("all", PageCell("a", 2.0), 2.0), ("all", PageCell("a"), None), ("all", PageCell("a", math.inf), None),
        ("none", PageCell("a", 2.0), None), ("hidden", PageCell("2", 2.0), None), ("hidden", PageCell("2.0", 2.0), 2.0),
        ("all", PageCell("2", 2.0), 2.0),
    ],
)  # fmt: skip
def test_numbers_that_a_cell_carries(digits, cell, number):
    assert PageTable("t", ["a"], [[cell]], digits=digits).sort_number(cell) == number


def test_columns_of_words_are_left():
    rows = [
        [PageCell("a"), PageCell("1", 1.0), PageCell("2.0x ddp", 2.0)],
        [PageCell("b"), PageCell("-"), PageCell("-")],
    ]
    assert PageTable("t", "abc", rows).left == "l1 l3"


@pytest.fixture
def grid(add, frame):
    """Return a function that returns the grid of all added rows."""
    samples = [1.0 + 0.01 * at for at in range(20)] + [9.0]
    times = {"device_ms": 1.0, "device_samples_ms": samples, "samples_ms": [each + 1 for each in samples]}
    more = {"skew_ms": 0.5, "time_ci_low_ms": 1.9, "time_ci_high_ms": 2.1, "gb_per_s": 10.0}
    add("triton_tp", 2.0, **times, **more)
    add("pytorch_gather", 6.0, **{name: [3 * each for each in value] if isinstance(value, list) else 3 * value
                                 for name, value in times.items()}, gb_per_s=5.0)  # fmt: skip
    add("quack", status="oom", reason="asked for 4 GiB", log_dir="sweeps/x")
    columns = ("time_ms", "device_ms",
               "gb_per_s", "skew_ms", "log_dir", "samples_ms", "device_samples_ms", "time_ci_low_ms",
               "time_ci_high_ms", "device_ci_low_ms", "device_ci_high_ms", "iterations", "loss_error",
               "grad_error", "floor_ms", "fraction_of_floor", "copy_gb_per_s", "peak_gib", "bytes_moved",
               "bytes_communicated", *(clock.samples_column for clock in CLOCKS))  # fmt: skip
    return arrange_rows(frame(), columns).grids[0]


def line(table, at):
    return dict(zip(table.columns, table.rows[at], strict=True))


def test_a_table_of_a_metric(grid):
    found = pivot_table(grid, metric("time_ms"))
    assert (found.digits, pivot_table(grid, metric("gb_per_s")).digits) == ("all", "none")
    cells = line(found, 0)
    assert cells["vocab"] == PageCell("32768", 32768.0) and cells["triton_tp"].kind == "best"
    assert (cells["triton_tp"].number, cells["pytorch_gather"].kind) == (2.0, "")
    assert (cells["quack"].text, cells["quack"].kind) == ("OOM", "bad")


def test_a_table_of_distributions(grid):
    found = distribution_table(grid)
    device, wall = line(found, 0), line(found, 1)
    assert (wall["clock"].text, device["clock"].text) == ("wall", "device")
    assert wall["median"].number == pytest.approx(2.1) and device["slowest"].number == 9.0
    assert wall["95% interval"] == PageCell("1.900 to 2.100 ms", 1.9) and device["95% interval"] is MISSING_CELL
    assert wall["skew between ranks"].number == 0.5 and device["skew between ranks"] is MISSING_CELL
    assert wall["outliers"] == PageCell("1 (4.8%)", 1.0) and wall["samples"].text == "21"
    assert wall["5th pct"].number == pytest.approx(2.01) and wall["fastest"].number == 2.0


def test_tables_of_speed_ups_and_of_failures(grid):
    found = speedup_table(grid)
    assert [line(found, at)["clock"].text for at in range(len(found.rows))] == ["device", "wall"]
    cells = line(found, 0)
    assert (cells["fastest"].text, cells["over"].text, cells["measured"].text) == (
        "triton_tp", "pytorch_gather", "one after the other",
    )  # fmt: skip
    assert cells["speed-up"] == PageCell("3x", pytest.approx(3.0)) and cells["95% interval"].text.count("x to ") == 1
    (failed,) = failure_table(grid).rows
    assert [cell.text for cell in failed][1:5] == ["quack", "oom", "asked for 4 GiB", "sweeps/x"]


def test_a_table_of_every_cell_leaves_out_what_all_share(grid):
    found = complete_table(grid)
    assert "gb_per_s" in found.columns and "peak_gib" not in found.columns and "samples_ms" not in found.columns
    assert found.digits == "hidden" and len(found.rows) == 3


def test_a_table_of_every_cell_has_no_traces_however_short(add, frame):
    traces = {name: [0.0, 1.0] for name in timeline.COLUMNS}
    for heads in (8, 16):
        sizes = {"hidden": 64, "ffn": 128, "heads": heads, "kv_heads": 4}
        add("block_auto", 1.0, workload="tp_block", **sizes, **traces)
    names = [*timeline.COLUMNS, "hidden", "ffn", "heads", "kv_heads"]
    (grid,) = arrange_rows(frame(), [*names, *_MEASURES]).grids
    found = complete_table(grid)
    assert not set(timeline.COLUMNS) & set(found.columns)


def test_a_comparison_as_a_page_sorts_by_numbers():
    made = render.page(compare_cells([pair(record(), slower(1.5), "a"), pair(record(), None, "b")], "time_ms", 0.03))
    first, second = re.findall("<tr><td>.*?</tr>", made)  # failures first
    assert first.startswith("<tr><td>a</td><td class=bad>slower</td><td data-v=1.5>1.500</td><td data-v=1.44")
    assert "<td data-v=1.0>1.000 ms</td><td data-v=1.5>1.500 ms</td><td data-v=2>1, 1</td>" in first
    assert second == f"<tr><td>b</td><td>only before</td>{'<td>-</td>' * 6}<td>GPU: ok</td></tr>"


def test_documents_of_equal_names_get_the_id_of_their_row(add, frame, tmp_path, monkeypatch, capsys):
    def document(row):
        return (row["variant"], {"time": row["time_ms"]}) if row["seed"] else None

    known = {"entropy_loss": dataclasses.replace(workloads()["entropy_loss"], document=document)}
    monkeypatch.setattr(json_documents, "workloads", lambda: known)
    for seed, time in ((1, 1.0), (2, 2.0), (3, 1.0), (0, 9.0)):
        add("triton_tp", time, seed=seed)
    written = write_documents(frame(), tmp_path / "new/folder")
    assert [file.name for file in written] == ["triton_tp.json", "triton_tp_r1.json", "triton_tp.json"]
    assert json.loads(written[0].read_text()) == {"time": 1.0} and json.loads(written[1].read_text()) == {"time": 2.0}
    assert capsys.readouterr().err.count("report: wrote ") == 3
    with pytest.raises(JobError, match="none of these rows is a correct row"):
        write_documents(frame()[lambda rows: rows["seed"] == 0], tmp_path)
    add("triton_tp", 3.0, seed=1)  # newer than the first row
    counts = {True: 4, False: 3}
    for all_rows, count in counts.items():
        assert len(write_documents(frame(), tmp_path / f"{all_rows}", all_rows=all_rows)) == count
    assert len(write_documents(frame(), tmp_path / "default")) == counts[False]
