"""Warnings about equal problems with different losses."""

from tpbench.report.analysis.grid import arrange_rows
from tpbench.report.analysis.verdicts import disagreements
from tpbench.report.studies import study_document


def records(frame):
    return [cell.record for grid in arrange_rows(frame) for cell in grid.cells()]


def test_old_rows_do_not_count(add, frame):
    add("triton_tp", 1.0, loss_value=99.0)
    add("pytorch_gather", 1.0, loss_value=10.5)
    (sentence,) = disagreements(records(frame()))
    assert study_document(frame(), None, ["time_ms"]).warnings == [sentence]
    add("triton_tp", 1.0, loss_value=10.5)
    assert disagreements(records(frame())) == {}
    assert sentence.startswith("equal problems show different losses (entropy_loss tokens=4096 vocab=32768)")
    assert sentence.endswith("Measure both again, and use neither until they agree")


def test_all_rows_of_a_problem_are_in_dispute(add, frame):
    for variant, loss in (("triton_tp", 10.5), ("quack", 10.5), ("liger", 12.0)):
        add(variant, 1.0, loss_value=loss)
    add("triton_tp", 1.0, vocab=1000)
    assert [*disagreements(records(frame())).values()] == [{"r0", "r1", "r2"}]
