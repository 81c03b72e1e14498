"""Single pictures show the numbers of the rows."""

import pytest

from tests.support import synthetic
from tests.support.commands import report as main
from tests.unit.report.test_verdicts import measured
from tpbench.report import plots
from tpbench.report.analysis.grid import arrange_rows
from tpbench.results.read import load


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    cells = [row | {"chained_ms": row["time_ms"]} for row in synthetic.cells()]
    return synthetic.write(cells, tmp_path_factory.mktemp("plots"))


@pytest.fixture(scope="module")
def grid(rows):
    return arrange_rows(load(rows))[0]


def test_a_file(rows, tmp_path):
    out = tmp_path / "plot.svg"
    assert main([str(rows), "--plot", "chained_time", "--loss", "cross_entropy", "-o", str(out)]) == 0
    assert out.read_bytes().startswith(b"<?xml") and ">time in a loop (ms)<" in out.read_text()


def test_the_lines_are_the_rows(rows, grid):
    figure = plots.draw_panels(plots.by_size(grid, "time_ms"))
    frame = load(rows)
    axes = next(axes for axes in figure.axes if axes.get_title() == "tp 4, tokens 4096")
    lines = {line.get_label(): line.get_ydata().tolist() for line in axes.get_lines()}
    here = frame[(frame.tp_size == 4) & (frame.tokens == 4096) & (frame.loss == "cross_entropy")].sort_values("vocab")
    assert lines["triton_tp"] == here[here.variant == "triton_tp"].time_ms.tolist()
    assert lines["floor"] == here[here.variant == "triton_tp"].floor_ms.tolist()
    failed = next(axes for axes in figure.axes if axes.get_title() == "tp 4, tokens 65536")
    assert "pytorch_gather: out of memory" in [line.get_label() for line in failed.get_lines()]


def test_every_line_has_its_name(add, frame):
    """matplotlib leaves out names that begin with an underscore, and the end of a long name is cut."""
    names = ["_mine.py:fast", "__x.py:_f", f"{'a' * 99}1.py:f", f"{'a' * 99}1{'b' * 99}.py:f"]
    for variant in names:
        add(variant, 1.0)
    (legend,) = plots.draw_panels(plots.by_size(*arrange_rows(frame()), "time_ms")).legends
    assert len({text.get_text() for text in legend.texts}) == 4 and " _mine.py:fast" in str(legend.texts)


def test_keys_that_change_together_are_panels(add, frame):
    """Models of several sizes, each by its tokens, do not become three panels with a dot each."""
    for vocab, tp_size in ((1000, 1), (2000, 2)):
        for tokens in (64, 128, 256):
            add("triton_tp", tokens / 100, vocab=vocab, tp_size=tp_size, tokens=tokens)
    (made,) = arrange_rows(frame())
    first, second = plots.draw_panels(plots.by_size(made, "time_ms")).axes
    assert (first.get_title(), second.get_title()) == ("vocab 1000, tp 1", "vocab 2000, tp 2")
    assert first.get_xlabel() == "tokens"
    assert [text.get_text() for text in first.get_xticklabels()] == ["64", "128", "256"]


def test_names_along_an_axis_are_in_the_order_of_their_work(add, frame):
    """Models are sorted by their floors, and what a model implies makes no panel of its own."""
    trained = {"workload": "train_step", "seq_length": 2048, "loss": None, "vocab": None, "block_cap": None}
    for model, layers, floor in (("qwen3_32b", 64, 9.0), ("qwen3_8b", 36, 2.0), ("qwen3_0p6b", 28, 0.1)):
        add("ddp", **measured(2 * floor, floor_ms=floor, model=model, num_layers=layers), **trained)
    (made,) = arrange_rows(frame())
    (axes,) = plots.draw_panels(plots.by_size(made, "device_ms")).axes
    assert [text.get_text() for text in axes.get_xticklabels()] == ["qwen3_0p6b", "qwen3_8b", "qwen3_32b"]
