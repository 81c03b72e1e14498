"""The picture of what fits is drawn as it was. After a change of the design write the new text to the file."""

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from tests.support import synthetic
from tests.support.figure_text import described
from tpbench.predict.cells import measured
from tpbench.predict.model import models
from tpbench.predict.picture import draw
from tpbench.report.plots import style
from tpbench.results.read import load
from tpbench.workloads import workloads

GOLDEN = Path(__file__).with_name("feasible.txt")


def test_the_picture_is_drawn_as_it_was(tmp_path):
    cells = measured(load(synthetic.write(synthetic.cells(), tmp_path)), workloads()["entropy_loss"])
    plot, fitted = cells.cost_model.plot, models(cells, errors=False)
    with style.drawing("x"):
        chosen = [fitted[each] for each in plot.variants if each in fitted]
        made = described(draw(chosen, plot, cells.cells, cells.cost_model.size()))
    assert made == GOLDEN.read_text()
