"""Every plot of a few synthetic rows is drawn as it was: its panels, limits, lines and texts.

After a change of the design look at the picture, and write the new texts with `python -m FILE`.
"""

import tempfile
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from tests.support import synthetic
from tests.support.figure_text import described
from tpbench.report import plots
from tpbench.report.analysis.grid import arrange_rows
from tpbench.report.plots import style
from tpbench.report.plots.panels import draw_panels
from tpbench.report.plots.timeline import COLUMNS
from tpbench.results.read import load
from tpbench.workloads.study_data import Panel, Picture, Series, VerticalLine

FOLDER = Path(__file__).with_name("figures")
TRACE = dict(
    zip(COLUMNS, ([0.0, 2.0, 3.0, 3.5], [1.0, 2.0, 0.5, 4.0], [0.0, 1.0, 2.0, 0.0], [0.0, 1.0, 2.0, 0.0]), strict=True)
)


def grid_of(folder):
    """Return the grid of the first loss, with traces in some of its rows."""
    columns = dict.fromkeys([*plots.COLUMNS, *COLUMNS])
    grid = arrange_rows(load(synthetic.write(synthetic.cells(), folder)), columns).grids[0]
    for row in grid.rows[2:4]:
        for record in [each for each in row.records if each][:2]:
            record.update(TRACE)
    return grid


PANELS = tuple(
    Panel(
        title,
        (Series("a", ((1.0, 0.5), (2.0, 4.0)), texts=("x", "y")), Series("a", ((1.0, 2.0), (2.0, 3.0)), dashed=True),
         Series("b", ((2.0, 1.0),))),
        (VerticalLine("b", 1.5), VerticalLine("a", 1.2, dotted=True)),
    )
    for title in ("one", "two", "three", "four")
)  # fmt: skip
STUDIES = {
    "study_ratios": Picture(PANELS, "x label", "y label", doubling=(1.0, 2.0)),
    "study_points": Picture(PANELS[:2], "x label", "y label", ratios=False),
}


def drawn(name, grid):
    """Return the text of a plot."""
    with style.drawing("x"):
        return described(draw_panels(STUDIES[name]) if name in STUDIES else plots.PLOTS[name].draw(grid))


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return grid_of(tmp_path_factory.mktemp("plots"))


NAMES = sorted([*plots.PLOTS, *STUDIES])


@pytest.mark.parametrize("name", NAMES)
def test_a_plot_is_drawn_as_it_was(name, rows):
    assert drawn(name, rows) == (FOLDER / f"{name}.txt").read_text()


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        made = grid_of(Path(scratch))
        for each in NAMES:
            (FOLDER / f"{each}.txt").write_text(drawn(each, made))
