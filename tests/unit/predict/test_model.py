"""The model finds what rows were made from, says how sure it is, and how far it reaches."""

import dataclasses
import datetime
from collections import Counter

import pytest

from tests.support import synthetic
from tpbench.predict.cells import measured
from tpbench.predict.model import models, place_of
from tpbench.results.read import load
from tpbench.settings import JobError
from tpbench.workloads.entropy_loss.cost_model import LossSize as Size

LATER = datetime.datetime(2026, 11, 21, tzinfo=datetime.UTC)


@pytest.fixture(scope="module")
def made(rows):
    return models(measured(load(rows)))[0]


def test_usable_rows(rows):
    rows = load(rows)
    found = measured(rows)
    assert found.gpu == "NVIDIA H200" and {cell.label for cell in found.cells} == set(synthetic.VARIANTS)
    assert {cell.row["status"] for cell in found.cells} == {"ok"} and len(found.cells) == 43
    assert len(measured(rows.assign(beside="another-sweep")).cells) == 43  # on GPUs of their own
    with pytest.raises(JobError, match="no row was measured on B300"):
        measured(rows, "B300")
    with pytest.raises(JobError, match="was measured on a GPU"):
        measured(rows[rows.status == "skipped"])
    with pytest.raises(JobError, match="was measured on a GPU"):
        measured(rows.assign(nodes=2))


def test_rows_of_replaced_code_are_not_those_of_today(tmp_path):
    old = [cell | {"kernels_version": "old"} for cell in synthetic.cells(factor=3.0)]
    synthetic.write(old, tmp_path, "old")
    new = [synthetic.cell("triton_tp", 32768, 1, kernels_version="new", started_at=LATER, finished_at=LATER)]
    synthetic.write(new, tmp_path, "new")
    synthetic.write([synthetic.cell("triton_tp", 128256, 2, tpbench_version="0.1.0")], tmp_path, "other_parts")
    by_variant = Counter(cell.label for cell in measured(load(tmp_path)).cells)
    assert by_variant == {"triton_tp": 1, "pytorch_tp_manual": 14, "pytorch_gather": 14}


def test_one_rank_is_unknown_if_only_several_were_measured(rows):
    found = measured(load(rows))
    cells = [cell for cell in found.cells if cell.label != "pytorch_tp_manual" or cell.size.tp_size > 1]
    by_variant, _ = models(dataclasses.replace(found, cells=tuple(cells)))
    size = Size(4096, 65536, 1, "cross_entropy")
    known = {label: model(size).estimates["device_ms"].known for label, model in by_variant.items()}
    assert known["triton_tp"] and not known["pytorch_tp_manual"]


def test_extrapolation_has_a_larger_error(made):
    near, far = Size(4096, 65536, 4, "cross_entropy"), Size(262144, 262144, 8, "cross_entropy")
    model = made["pytorch_tp_manual"]
    assert place_of(model.cells, near) == ("size", 1.0) and place_of(model.cells, far)[0] == "more ranks"
    assert place_of(model.cells, Size(loss="jsd"))[0] == "loss"
    times = [model(size).estimates["time_ms"] for size in (near, far)]
    assert times[1].error > 4 * times[0].error
    assert times[0].low < times[0].value < times[0].high
