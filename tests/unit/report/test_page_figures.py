"""Figures of a page: which panels are shown, their legend and notes, and the bars of a trace."""

import re

import pytest

from tpbench.report.analysis.grid import GridRow, RecordGrid
from tpbench.report.page import trace
from tpbench.report.page.chart import Axis, Line, Panel
from tpbench.report.page.column_styles import Look
from tpbench.report.page.pictures import PROBLEMS, _figure, _values, block_caps, by_problem, by_size, floor_shares
from tpbench.report.plots.timeline import COLUMNS

AXIS = Axis(1.0, 100.0, "ms")
LOOKS = {("w", name): Look(at, at) for at, name in enumerate(("a", "b"))}


def panel(title, *counts, crosses=()):
    lines = [
        Line(f"v{at}", Look(at, at), [(point, 2.0) for point in range(count)], crosses)
        for at, count in enumerate(counts)
    ]
    return Panel(title, ["x", "y", "z"], lines, "k")


def titles(figure):
    return [re.search('aria-label="(.*?)"', each)[1] for each in figure.panels]


def test_the_fullest_panels_are_shown_in_their_order():
    panels = [panel("one", 1, 1), panel("two", 3, 3), panel("three", 2, 0), panel("four", 3, 2)]
    figure = _figure(panels, AXIS, "caption", most=2)
    assert titles(figure) == ["two", "four"] and figure.caption == "caption"
    assert figure.notes == ["2 more panels are left out; the folded pictures of times have all."]
    assert _figure(panels, AXIS, "caption", most=4).notes == []
    assert [name for _, name in figure.legend] == ["v0", "v1"]
    assert _values(panels[:1]) == [2.0, 2.0]


def test_notes_explain_arrows_and_crosses():
    low = Panel("t", ["x"], [Line("v", Look(0, 0), [(0, 0.5), (1, 1.0)]), Line("floor", None, [(0, 3.0)])], "k")
    figure = _figure([low], AXIS, "c")
    assert figure.notes == ["An arrow at the bottom stands for a value far below the axis: v (0.500 ms)."]
    assert [name for _, name in figure.legend] == ["v", "floor"]
    crossed = _figure([panel("t", 2, crosses=[1])], AXIS, "c")
    assert crossed.notes == ["A cross at the top stands for a cell that ran out of memory."]


def record(time, floor=1.0, **fields):
    usual = {"status": "ok", "time_ms": time, "floor_ms": floor, "interpreted": False, "warmed_up": True, "vocab": 1}
    return usual | fields


def grid(rows, names=("vocab", "tp_size")):
    made = tuple(GridRow(key, records) for key, records in rows.items())
    return RecordGrid("w", {}, names, ("a", "b"), made, tuple(range(len(names))))


def test_shares_of_the_floor_are_percentages():
    rows = {(vocab, 1): (record(4.0 * vocab, vocab), record(2.0 * vocab, vocab)) for vocab in (1, 2)}
    rows[4, 1] = (record(8.0, None), None)
    figure = floor_shares(grid(rows), "time_ms", LOOKS, "Share")
    (drawn,) = figure.panels
    assert re.findall("<title>(.*?)</title>", drawn) == ["a: 25.00 %"] * 2 + ["b: 50.00 %"] * 2
    assert [name for _, name in figure.legend] == ["a", "b", "floor"] and figure.caption == "Share"
    assert floor_shares(grid({(1, 1): (record(1.0), None)}), "time_ms", LOOKS, "Share") is None


def test_a_picture_by_problem_has_the_last_problems_with_two_values():
    rows = {(vocab, 1): (record(1.0 + vocab), record(2.0)) for vocab in range(PROBLEMS + 3)}
    rows[99, 1] = (record(1.0), record(2.0, status="oom"))
    figure = by_problem(grid(rows), "time_ms", LOOKS, "Time")
    (drawn,) = figure.panels
    assert figure.caption == "Time (ms)" and drawn.count("<title>") == 2 * PROBLEMS
    assert "a: 4.000 ms" in drawn and "a: 3.000 ms" not in drawn  # the first three are left out
    alone = by_problem(grid({(7, 1): (record(1.0), record(2.0))}), "time_ms", LOOKS, "Time")
    assert titles(alone) == ["vocab=7 tp=1"]
    assert by_problem(grid({(7, 1): (record(1.0), None)}), "time_ms", LOOKS, "Time") is None


def test_a_picture_by_size_has_crosses_where_memory_ran_out():
    rows = {(vocab, tp): (record(vocab / tp), None) for vocab in (1000, 2000) for tp in (1, 2)}
    rows[4000, 1] = (record(None, status="oom"), None)
    figure = by_size(grid(rows), "time_ms", LOOKS, "Time")
    assert figure.caption == "Time (ms)" and len(figure.panels) == 2
    assert "A cross at the top stands for a cell that ran out of memory." in figure.notes
    assert by_size(grid({(1000, 1): (record(1.0), None)}), "time_ms", LOOKS, "Time") is None


def test_no_block_caps_make_no_picture():
    assert block_caps(grid({(1, 1): (record(1.0, fraction_of_floor=None, block_cap="auto"), None)}), LOOKS, "c") is None


def test_bars_of_a_trace_have_their_places():
    values = dict(zip(COLUMNS, ([0.0, 2.0, 3.0], [1.0, 2.0, 0.0001], [0.0, 1.0, 0.0], [0.0, 2.0, 0.0]), strict=True))
    drawn = trace._panel("v", values, end=8.0)
    assert 'viewBox="0 0 320 47"' in drawn and 'aria-label="v, 4 ms"' in drawn  # three lanes of 9
    assert '<path class="span product" d="M0.0 20h40.0M120.0 20h0.1"/>' in drawn
    assert '<path class="span transfer" d="M80.0 38h80.0"/>' in drawn and "span other" not in drawn


@pytest.mark.parametrize("traced", [False, True])
def test_a_figure_of_traces_has_one_time_axis(traced, monkeypatch):
    values = dict(zip(COLUMNS, ([0.0], [5.0], [2.0], [0.0]), strict=True))
    longer = values | {COLUMNS[0]: [1.0], COLUMNS[1]: [6.0]}
    cells = [("a", values), ("b", longer)] if traced else []
    monkeypatch.setattr(trace, "traced_cells", lambda grid: ("vocab=1", cells))
    figure = trace.step_traces(grid({}))
    assert (figure is not None) == traced
    if figure:
        assert len(figure.panels) == 2 and len(figure.legend) == 3
        assert figure.notes[0].startswith("vocab=1. All panels have the same time axis, from 0 to 7 ms")
        assert 'd="M0.0 20h228.6"' in figure.panels[0]
