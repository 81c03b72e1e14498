"""Verdicts: the fastest correct variant by the right clock, its distance, and every reason to doubt."""

import pytest

from tpbench.report.analysis.grid import arrange_rows, disagreements
from tpbench.report.analysis.verdicts import DOUBTS, answer, answers, verdict_of
from tpbench.report.pivot import pivot

STEADY = [1.0 + 0.001 * at for at in range(12)]


@pytest.fixture
def judge(frame):
    """Return a function that returns the verdicts of all added rows."""

    def judge():
        grids = arrange_rows(frame())
        records = [record for grid in grids for record in grid.records]
        disputed = {row_id for ids in disagreements(records).values() for row_id in ids}
        return [verdict_of(grid, key, disputed) for grid in grids for key in grid.lines]

    return judge


def measured(factor, wall=None, **changes):
    """Return the times of a row: device time `factor`, wall time `wall`, with samples."""
    wall = wall or factor + 0.1
    times = {"device_ms": factor, "device_samples_ms": [factor * each for each in STEADY]}
    return times | {"time_ms": wall, "samples_ms": [wall * each for each in STEADY]} | changes


def test_only_correct_measurements_win(add, judge):
    add("triton_tp", **measured(2.0, fraction_of_floor=0.88))
    add("quack", **measured(0.1), status="wrong")
    add("liger", **measured(0.2), interpreted=True)
    add("megatron", **measured(0.3), warmed_up=False)
    add("torch_loss_parallel", status="oom")
    add("pytorch_gather", **measured(4.0))
    (verdict,) = judge()
    assert verdict.fastest.column == "triton_tp" and verdict.runner_up.column == "pytorch_gather"
    assert verdict.ratio.value == pytest.approx(2) and verdict.doubts == ()
    assert answer([verdict]) == (
        "Fastest in 1 problem: triton_tp. "
        "triton_tp reaches 88% of the hardware limit and is 2.00 times as fast as the next (device time)."
    )


def test_a_variant_without_a_competitor_is_not_called_fastest(add, judge):
    add("pytorch_gather", time_ms=2.0, fraction_of_floor=0.5, device="cpu", gpu_name=None)
    add("triton_tp", time_ms=9.0, interpreted=True, device="cpu", gpu_name=None)
    assert answer(judge()) == (
        "Measured alone in 1 problem: pytorch_gather. pytorch_gather reaches 50% of the hardware limit (wall time)."
    )


def test_device_time_leads_and_the_clocks_may_disagree(add, judge):
    add("triton_tp", **measured(1.0, wall=3.0))
    add("pytorch_gather", **measured(1.5, wall=1.6))
    (verdict,) = judge()
    assert (verdict.clock.column, verdict.fastest.column) == ("device_ms", "triton_tp")
    assert verdict.doubts == ("wall differs",)


def test_wall_time_decides_if_a_cell_has_no_device_time(add, judge):
    add("triton_tp", **measured(1.0, wall=3.0))
    add("pytorch_gather", time_ms=1.6)
    (verdict,) = judge()
    assert (verdict.clock.column, verdict.fastest.column) == ("time_ms", "pytorch_gather")
    assert verdict.doubts == ()
    assert verdict.ratio.value == pytest.approx(3.0 / 1.6) and answer([verdict]).endswith("(wall time).")


def test_each_doubt_is_named(add, judge):
    add("triton_tp", **measured(1.0), host="a", kernels_version="1", loss_value=10.5, beside="r9")
    add("pytorch_gather", **measured(1.0001), host="b", kernels_version="2", loss_value=12.5)
    add("triton_tp", **measured(1.0), vocab=1000)
    add("triton_tp", **measured(2.0), vocab=2000, interpreted=True)
    add("triton_tp", **measured(1.0), vocab=4000)
    add("triton_tp", **measured(1.1), vocab=4000, graph=True)
    few, lone, unmeasured, tie = (next(each for each in judge() if f"vocab={size}" in each.problem) for size in
                                  (4000, 1000, 2000, 32768))  # fmt: skip
    assert tie.doubts == ("undecided", "losses differ", "shared host")
    assert lone.doubts == ("alone",) and unmeasured.doubts == ("unmeasured",) and unmeasured.fastest is None
    assert few.runner_up.column == "triton_tp graph=true" and few.doubts == ()
    assert {*tie.doubts, *lone.doubts, *unmeasured.doubts, "wall differs", "below floor"} == set(DOUBTS)


def test_the_sentence_of_many_problems(add, judge):
    for vocab, winner in ((1000, "triton_tp"), (2000, "triton_tp"), (4000, "quack")):
        times = {"triton_tp": 2.0, "quack": 2.0, "pytorch_gather": 10.0, winner: 1.0}
        for variant, time in times.items():
            add(variant, **measured(time, vocab=vocab, fraction_of_floor=0.8 / time))
    found = judge()
    assert answer(found) == (
        "Fastest in 3 problems: triton_tp 2, quack 1. triton_tp reaches 80% of the hardware limit "
        "and is 2.00 times as fast as the next (medians, device time)."
    )
    add("megatron", **measured(0.1, vocab=8000))  # nothing to compare with
    assert answer(judge()) == answer(found)
    assert answer([]) == "No row is both correct and a measurement."


def test_machines_are_judged_apart(add, judge):
    """A toy row of a CPU changes no sentence about GPUs."""
    add("triton_tp", **measured(1.0))
    add("pytorch_gather", **measured(3.0))
    (alone,) = answers(judge())
    for variant, time in (("pytorch_gather", 1.0), ("pytorch_tp_manual", 2.0)):
        add(variant, **measured(time, vocab=64, device_ms=None, device="cpu", gpu_name=None, cpu_model="EPYC"))
    found = answers(judge())
    assert found[0] == f"NVIDIA H200: {alone}" and found[1].startswith("EPYC: Fastest in 1 problem: pytorch_gather")


@pytest.mark.parametrize("others", [(), ("liger",)])
def test_rows_whose_inputs_change_are_not_ranked_against_those_whose_inputs_do_not(add, frame, judge, others):
    """The kind of which there are more rows decides a problem. A table shows both, each with its own best."""
    add("triton_tp", **measured(2.0))
    add("pytorch_gather", **measured(3.0))
    for variant in ("quack", *others, *(["megatron"] if others else [])):
        add(variant, **measured(1.0 if variant == "quack" else 1.5), fresh=True)
    (verdict,) = judge()
    assert verdict.fastest.column == ("quack fresh=true" if others else "triton_tp")
    table = pivot(frame(), "device_ms").tables[0]
    texts = table.texts[0]
    assert "fresh=true" in table.notes[0] and "compared only with each other" in table.notes[0]
    assert [text for text in texts if "(1.00x)" in text] == ["2.000 ms (1.00x)", "1.000 ms (1.00x)"]
    assert "3.000 ms (1.50x)" in texts
