"""Warnings about equal problems with different losses."""

import pytest

from tpbench.report.analysis.grid import arrange_rows
from tpbench.report.analysis.records import problem_identity
from tpbench.report.analysis.verdicts import disagreements
from tpbench.workloads import workloads

TRAIN = workloads()["train_step"]
NAME = "grad_norms"
GROWTH = TRAIN.pivot.trajectories[NAME]


def records(frame):
    return [cell.record for grid in arrange_rows(frame) for cell in grid.cells()]


def test_old_rows_do_not_count(add, frame):
    add("triton_tp", 1.0, loss_value=99.0)
    add("pytorch_gather", 1.0, loss_value=10.5)
    (sentence,) = disagreements(records(frame()))
    add("triton_tp", 1.0, loss_value=10.5)
    assert disagreements(records(frame())) == {}
    assert sentence.startswith("equal problems show different losses (entropy_loss tokens=4096 vocab=32768)")
    assert sentence.endswith("Measure both again, and use neither until they agree")


def test_all_rows_of_a_problem_are_in_dispute(add, frame):
    for variant, loss in (("triton_tp", 10.5), ("quack", 10.5), ("liger", 12.0)):
        add(variant, 1.0, loss_value=loss)
    add("triton_tp", 1.0, vocab=1000)
    assert [*disagreements(records(frame())).values()] == [{"r0", "r1", "r2"}]


def trained(variant, values, loss=5.0):
    """Return a row of a training, as grids have it."""
    row = dict.fromkeys([*problem_identity(TRAIN), "tokens", "tp_size"], 1) | {
        "workload": "train_step", "label": variant, "status": "ok", "dtype": "float32", "row_id": variant,
        "loss_value": loss, NAME: values,
    }  # fmt: skip
    return {**dict.fromkeys(option.name for option in TRAIN.options), **row}


def said(*rows):
    return tuple(disagreements([dict(row) for row in rows]))


def test_a_shorter_training_is_compared_as_far_as_it_goes():
    whole, short = trained("fsdp", [5.0, 4.0, 3.0]), trained("ddp", [5.0, 4.0])
    assert (
        said(whole, short) == () and said(whole, trained("ddp", [])) == () and said(whole, trained("ddp", None)) == ()
    )
    (sentence,) = said(whole, trained("ddp", [5.0, 3.0]))
    assert f"{NAME} part at step 2: ddp" in sentence and "diverge" in sentence
    (sentence,) = said(whole, trained("ddp", [4.0, 1.0]))
    assert sentence.count("part at step") == 1 and "part at step 1:" in sentence


@pytest.mark.parametrize("excess", [0.9, 1.1])
def test_the_tolerance_grows_from_step_to_step(excess):
    tolerance = TRAIN.pivot.loss_tolerance.get("float32", 1e-4)
    for step in range(4):
        other = [5.0] * 4
        other[step] = 5.0 / (1 - excess * tolerance * GROWTH**step)
        assert bool(said(trained("fsdp", [5.0] * 4), trained("ddp", other))) == (excess > 1)
