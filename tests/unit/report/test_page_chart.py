"""A chart of a page: its elements have the places that its values ask for."""

import re
from pathlib import Path

import pytest

from tpbench.report.page import chart
from tpbench.report.page.chart import Axis, Line, Panel, logarithmic_axis, marker_svg, panel_svg, share_axis
from tpbench.report.page.column_styles import Look

GOLDEN = Path(__file__).with_name("panel.svg")
AXIS = Axis(1.0, 100.0, "ms")
LINES = (
    Line("fast", Look(0, 0), [(2, 10.0), (0, 1.0), (1, 0.5)], crosses=[3]),
    Line("slow", Look(1, 1, 1), [(0, 20.0), (1, 100.0)]),
    Line("floor", None, [(0, 2.0), (2, 4.0)]),
)
PANEL = Panel("tp 2 & more", ["1k", "2k", "4k", "8k"], LINES, "vocab")


def elements(svg):
    """Return each element of a picture on a line of its own."""
    return re.sub(r"(?<=>)(?=<(?!/?title|/text|/path))", "\n", svg) + "\n"


def test_a_panel_is_drawn_as_it_was():
    """After a change of the design: look at the new picture in a browser, and write it to the file."""
    assert elements(panel_svg(PANEL, AXIS)) == GOLDEN.read_text()


def test_a_marker_tells_its_value_and_points_may_stand_alone():
    told = panel_svg(PANEL, AXIS, tips=True)
    assert re.findall("<title>(.*?)</title>", told) == [
        "fast: 1.000 ms", "fast: 10.00 ms", "slow: 20.00 ms", "slow: 100.0 ms",
    ]  # fmt: skip
    apart = Panel("t", PANEL.categories, LINES, "vocab", joined=False)
    assert panel_svg(apart, AXIS).count('class="floor"') == 1
    assert panel_svg(PANEL, AXIS).count("<path") - panel_svg(apart, AXIS).count("<path") == 2  # two lines


@pytest.mark.parametrize(
    ("points", "look", "drawable"),
    [([(0, 1.0)], Look(0, 0), False), ([(0, 1.0), (1, 1.0)], Look(0, 0), True), ([(0, 1.0), (1, 1.0)], None, False)],
)
def test_a_picture_needs_two_points_of_a_variant(points, look, drawable):
    assert Panel("t", ["a", "b"], [Line("x", look, points)], "k").is_drawable == drawable


def test_places_on_an_axis():
    assert [AXIS.share(value) for value in (1.0, 10.0, 100.0, 0.1)] == pytest.approx([0.0, 0.5, 1.0, 0.0])
    straight = Axis(20.0, 120.0, "%", logarithmic=False)
    assert [straight.share(value) for value in (20.0, 70.0, 120.0, 1.0)] == [0.0, 0.5, 1.0, 0.0]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (1.0, 5.9, [1, 1.5, 2, 3, 4, 5]),
        (1.0, 6.0, [1, 2, 5]),
        (0.9, 3.0, [1, 1.5, 2, 3]),
        (0.5, 90.0, [0.5, 1, 2, 5, 10, 20, 50]),
        (1.0, 199.0, [1, 2, 5, 10, 20, 50, 100]),
        (1.0, 200.0, [1, 10, 100]),
        (7.0, 75.0, [10, 20, 50]),
    ],
)
def test_marks_of_a_logarithmic_axis(low, high, ticks):
    assert Axis(low, high, "ms").ticks == pytest.approx(ticks)


@pytest.mark.parametrize(
    ("high", "ticks"),
    [
        (104.0, [0, 20, 40, 60, 80, 100]),
        (121.0, [0, 40, 80, 120]),
        (300.0, [0, 100, 200, 300]),
        (999.0, [0, 200, 400, 600, 800]),
        (10.0, [0, 2, 4, 6, 8, 10]),
    ],
)
def test_marks_of_shares(high, ticks):
    assert Axis(0, high, "%", logarithmic=False).ticks == pytest.approx(ticks)


def test_ends_of_axes():
    shares = share_axis([40.0, 150.0])
    assert (shares.low, shares.high, shares.unit, shares.logarithmic) == (0, 156.0, "%", False)
    assert share_axis([40.0]).high == 104.0
    for values, ends in (([1.0, 2.0], (1.0, 2.0)), ([1.0, 1.999], (1 / 1.4, 1.999 * 1.4)), ([5.0], (5 / 1.4, 7.0))):
        found = logarithmic_axis(values, "ms")
        assert (found.low * 1.12, found.high / 1.12) == pytest.approx(ends) and found.logarithmic


@pytest.mark.parametrize(
    ("values", "low"),
    [
        ([0.009, 1.0, 5.0, 10.0], 1.0),
        ([0.011, 1.0, 5.0, 10.0], 0.011),  # above a thousandth of the largest
        ([0.009, 0.269, 5.0, 10.0], 0.009),  # thirty times
        ([0.009, 0.271, 5.0, 10.0], 0.271),
        ([0.001, 0.001, 1.0, 5.0, 10.0], 0.001),  # two of five are many
        ([0.001, 0.001, 1.0, 5.0, 9.0, 10.0], 1.0),  # two of six are few
    ],
)
def test_few_values_near_zero_do_not_stretch_an_axis(values, low):
    assert logarithmic_axis(values, "GiB").low == pytest.approx(low / 1.12)


def test_a_long_title_has_two_lines():
    letters = 46
    assert int((chart.WIDTH - 8) / chart.TITLE_LETTER) == letters
    two = chart._title("a" * 30 + " " + "b" * 20)
    assert two == [f'<text class="t" x="4" y="11">{"a" * 30}</text>', f'<text class="t" x="4" y="23">{"b" * 20}</text>']
    (one,) = chart._title("a" * 25 + " " + "b" * 20)  # exactly as long as a line
    assert "a b" in one
    cut = chart._title(" ".join(["c" * 40] * 3))
    assert cut[1].endswith(f'y="23">{"c" * 40}...</text>') and len(cut) == 2
    assert chart._title(" ".join(["d" * 46] * 3))[1].endswith(f">{'d' * 43}...</text>")
    assert chart._title("") == []


@pytest.mark.parametrize(("count", "length", "shown"), [(4, 2, 4), (9, 20, 2), (40, 1, 14), (20, 4, 7)])
def test_as_many_categories_are_named_as_fit(count, length, shown):
    panel = Panel("t", ["x" * length] * count, [], "axis")
    made = chart._categories(panel, lambda at: at)
    width = length * chart.LETTER + 8
    assert len(made) - 1 == shown and shown * width <= chart.WIDTH - chart.LEFT - chart.RIGHT + width
    assert made[-1] == '<text class="x" x="178" y="214">axis</text>' and 'y="199"' in made[0]


def test_a_key_of_the_legend():
    assert marker_svg(Look(2, 0, 1)) == (
        '<svg class="key" viewBox="0 0 24 12" aria-hidden="true">'
        f'<path d="M1 6h22" style="stroke:var(--s2)"{Look(2, 0, 1).dashes}/>'
        f'<path d="M12 6{chart.MARKERS[0]}" style="stroke:var(--s2);fill:var(--ground)"/></svg>'
    )
