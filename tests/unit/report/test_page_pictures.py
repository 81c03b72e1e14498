"""Pictures of a page: distinct looks, no single points, and an axis that no variant stretches."""

import pytest

from tests.unit.report.test_verdicts import measured
from tpbench.report.analysis.grid import arrange_rows
from tpbench.report.analysis.verdicts import verdict_columns
from tpbench.report.page.chart import Line, Panel, logarithmic_axis, marker_svg, panel_svg, share_axis
from tpbench.report.page.column_styles import Look, assign_looks
from tpbench.report.page.html_page import page
from tpbench.report.page.pictures import block_caps, by_problem, by_size, floor_shares
from tpbench.report.plots.block_cap import shares
from tpbench.workloads import workloads

COLUMNS = (*verdict_columns(), "floor_ms")


def test_every_variant_has_its_own_look(add, frame):
    for workload in workloads().values():
        for variant in workload.variants:
            add(variant, 1.0, workload=workload.name)
    for at in range(30):
        add(f"mine_{at:02}", 1.0)
    add("triton_tp", 1.0, graph=True)
    looks = assign_looks(arrange_rows(frame()).grids)
    plain = {name: (look.colour, look.marker) for name, look in looks.items() if not look.options}
    assert len(plain) == 30 + sum(len(each.variants) for each in workloads().values())
    assert len(set(plain.values())) == len(plain)
    for workload in workloads().values():  # colours of one workload differ, up to twelve
        assert len({plain[workload.name, variant][0] for variant in workload.variants}) == len(workload.variants)
    option = looks["entropy_loss", "triton_tp graph=true"]
    assert (option.colour, option.marker) == plain["entropy_loss", "triton_tp"]
    assert option.dashes and option != looks["entropy_loss", "triton_tp"]


@pytest.fixture
def sizes(add, frame):
    """Rows of two variants, and a function that returns their grid with their looks."""
    for vocab in (1000, 2000, 4000):
        add("triton_tp", **measured(vocab / 1000, vocab=vocab, floor_ms=vocab / 2000, peak_gib=5e-5))
        add("quack", **measured(vocab / 500, vocab=vocab, floor_ms=vocab / 2000, peak_gib=vocab / 1000))
        add("pytorch_gather", **measured(vocab / 100, vocab=vocab, floor_ms=vocab / 2000, peak_gib=vocab / 500))
    add("triton_tp", **measured(1.0, vocab=4000, tp_size=4, floor_ms=0.5, peak_gib=1.0))

    def grid():
        (grid,) = arrange_rows(frame(), COLUMNS).grids
        return grid, assign_looks([grid])

    return grid


def test_no_panel_shows_a_single_point(sizes):
    grid, looks = sizes()
    figure = by_size(grid, "device_ms", looks, "Device time")
    assert len(figure.panels) == 1 and "tp 2" in figure.panels[0]
    assert [name for _, name in figure.legend] == ["floor", "triton_tp", "quack", "pytorch_gather"] or len(
        figure.legend
    ) == 4


def test_a_line_of_block_caps_has_the_look_of_its_column_or_variant(add, frame):
    for cap, share in (("64", 0.5), ("128", 0.25)):
        for graph in (False, True):
            add("triton_tp", 1.0, block_cap=cap, graph=graph, fraction_of_floor=share)
    (grid,) = arrange_rows(frame(), ("fraction_of_floor",)).grids
    of_variant, of_column = Look(3, 2), Look(4, 1)
    columns = {column for column, _ in shares(grid)}
    assert columns == {"triton_tp", "triton_tp graph=true"}

    def looks_of(looks):
        return {name: svg for svg, name in block_caps(grid, looks, "Shares").legend}

    variant = {("entropy_loss", "triton_tp"): of_variant}
    assert looks_of(variant) == dict.fromkeys(columns, marker_svg(of_variant))
    assert looks_of({})["triton_tp"] == marker_svg(Look(0, 0))
    both = looks_of(variant | {("entropy_loss", "triton_tp graph=true"): of_column})
    assert both["triton_tp graph=true"] == marker_svg(of_column) and both["triton_tp"] == marker_svg(of_variant)


def test_no_picture_of_one_cell(add, frame):
    add("triton_tp", **measured(1.0, floor_ms=0.5))
    (grid,) = arrange_rows(frame(), COLUMNS).grids
    looks = assign_looks([grid])
    assert by_size(grid, "device_ms", looks, "x") is None and floor_shares(grid, "device_ms", looks, "x") is None
    assert by_problem(grid, "device_ms", looks, "x") is None
    add("quack", **measured(2.0, floor_ms=0.5))
    (grid,) = arrange_rows(frame(), COLUMNS).grids
    (panel,) = by_problem(grid, "device_ms", assign_looks([grid]), "x").panels
    assert "triton_tp: 1.000 ms" in panel and "quack: 2.000 ms" in panel


def test_a_variant_in_place_does_not_stretch_the_axis(sizes):
    grid, looks = sizes()
    figure = by_size(grid, "peak_gib", looks, "Memory")
    assert "triton_tp (5e-05 GiB)" in figure.notes[0]
    assert ">1e-05<" not in figure.panels[0] and ">1<" in figure.panels[0]


@pytest.mark.parametrize(
    "values, low, high",
    [
        ([1, 2, 4], 1, 4),
        ([5e-5, 1, 2, 4], 1, 4),
        ([5e-5, 6e-5, 1, 2, 4, 5], 1, 5),
        ([0.01, 0.02, 5, 8], 0.01, 8),  # a gap, but not near zero
        ([5e-5, 6e-5, 7e-5, 4], 5e-5, 4),  # the many are not left out for the sake of one
        ([3, 3], 3 / 1.4, 3 * 1.4),
    ],
)
def test_ends_of_a_logarithmic_axis(values, low, high):
    axis = logarithmic_axis(values, "GiB")
    assert (axis.low, axis.high) == pytest.approx((low / 1.12, high * 1.12))
    assert len(axis.ticks) >= 2 and all(axis.low <= tick <= axis.high for tick in axis.ticks)
    assert axis.share(axis.low) == 0 and axis.share(axis.high) == pytest.approx(1)


def test_an_axis_of_shares():
    assert share_axis([40.0, 88.0]).ticks == [0, 20, 40, 60, 80, 100]
    assert share_axis([40.0, 113.0]).high > 113


def test_text_of_rows_is_escaped():
    name = "<script>x</script>\"'&"
    panel = Panel(name, [name, "b"], [Line(name, Look(0, 0), [(0, 1.0), (1, 2.0)])], name)
    made = panel_svg(panel, logarithmic_axis([1, 2], name), tips=True)
    assert "<script" not in made and "\"'&" not in made


def test_device_time_leads_on_a_page(sizes, frame):
    made, by_wall = page(frame()), page(frame(), "time_ms")
    assert made.index('data-name="verdicts"') < made.index('class="workload"') < made.index('data-name="device_ms"')
    assert made.index('data-name="device_ms"') < made.index('data-name="time_ms"')
    assert by_wall.index('data-name="time_ms"') < by_wall.index('data-name="device_ms"')
    assert (
        "Fastest: triton_tp in all 3 compared problems. quack takes 2.00 times as long (medians, device time)." in made
    )


def test_names_along_an_axis_are_in_the_order_of_their_work(add, frame):
    """Models are sorted by their floors, and what a model implies makes no panel of its own."""
    trained = {"workload": "train_step", "seq_length": 2048, "loss": None, "vocab": None, "block_cap": None}
    for model, layers, floor in (("qwen3_32b", 64, 9.0), ("qwen3_8b", 36, 2.0), ("qwen3_0p6b", 28, 0.1)):
        add("ddp", **measured(2 * floor, floor_ms=floor, model=model, num_layers=layers), **trained)
    (grid,) = arrange_rows(frame(), COLUMNS).grids
    (panel,) = by_size(grid, "device_ms", assign_looks([grid]), "x").panels
    assert panel.index("qwen3_0p6b") < panel.index("qwen3_8b") < panel.index("qwen3_32b")
