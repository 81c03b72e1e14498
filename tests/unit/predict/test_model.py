"""The model finds what rows were made from, says how sure it is, and how far it reaches."""

import pytest

from tests.support import synthetic
from tpbench.predict.cells import measured
from tpbench.predict.model import extrapolation_factors, models
from tpbench.results.read import load
from tpbench.settings import JobError
from tpbench.workloads.entropy_loss.cost_model import LossSize as Size


@pytest.fixture(scope="module")
def made(rows):
    return models(measured(load(rows)))


def test_usable_rows(rows):
    rows = load(rows)
    found = measured(rows)
    assert found.gpu == "NVIDIA H200" and {cell.label for cell in found.cells} == set(synthetic.VARIANTS)
    assert {cell.row["status"] for cell in found.cells} == {"ok", "oom"} and len(found.cells) == 44
    with pytest.raises(JobError, match="no row was measured on B300"):
        measured(rows, "B300")
    with pytest.raises(JobError, match="was measured on a GPU"):
        measured(rows[rows.status == "skipped"])


def test_extrapolation_has_a_larger_error(made):
    near, far = Size(4096, 65536, 4, "cross_entropy"), Size(262144, 262144, 8, "cross_entropy")
    model = made["pytorch_tp_manual"]
    assert extrapolation_factors(model.cells, near) == {}
    assert extrapolation_factors(model.cells, far) == {"tokens": 64.0, "vocab": 2.0, "tp_size": 2.0}
    assert model(far).time_ms.error > 9 * model(near).time_ms.error
    assert model(near).time_ms.low < model(near).time_ms.value < model(near).time_ms.high
