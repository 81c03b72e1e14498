"""Fits of cost models with known coefficients, and predictions of models that are made by hand."""

import dataclasses
import math
from types import SimpleNamespace

import pytest

from tpbench.predict import memory
from tpbench.predict import memory as target
from tpbench.predict.cells import MeasuredCell, MeasuredCells, span
from tpbench.predict.command import whole_numbers
from tpbench.predict.memory import MODELS, Estimate, MeasuredMemory, RanOut, free_gib, memory_outcome, memory_reason
from tpbench.predict.model import (
    Fit,
    VariantModel,
    extrapolation_factors,
    fit,
    fit_cells,
    leave_out,
    models,
    predicted_oom,
)


@dataclasses.dataclass(frozen=True)
class Size:
    """A problem of a made-up workload."""

    tokens: int = 1024
    tp_size: int = 1
    kind: str = "usual"
    inputs_gib: float = 0.5


def time_terms(size, sent):
    terms = {"launch": 1.0, "bytes_of_tokens": size.tokens / 1024}
    return terms | ({"collective_wire": sent, "collective_start": 1.0} if size.tp_size > 1 else {})


COST = SimpleNamespace(
    time_terms=(time_terms,),
    memory_terms=lambda size: {"tokens": float(size.tokens)},
    sent_terms=lambda size: {"tokens": float(size.tokens)} if size.tp_size > 1 else {},
)
SIZES = [Size(1024 * tokens, tp) for tokens in (1, 2, 5, 9) for tp in (1, 2)]


def sent(size):
    return 12.0 * size.tokens if size.tp_size > 1 else 0.0


def device_ms(size):
    return 0.3 + 0.7 * size.tokens / 1024 + ((0.2 + 1e-6 * sent(size)) if size.tp_size > 1 else 0.0)


def cell(size, label="v", status="ok", wall=1.0, limit=100.0, **fields):
    ms, gib = device_ms(size), 1e-3 * size.tokens
    made = MeasuredCell(label, size, status, wall + ms, ms, gib, sent(size), limit, 4000.0)
    return dataclasses.replace(made, **fields)


CELLS = tuple(map(cell, SIZES))


def test_a_fit_finds_the_coefficients():
    fits = fit_cells(COST, CELLS)
    assert set(fits) == {"peak_gib", "sent", "time_ms", "device_ms"}
    assert fits["sent"].coefficients == {"tokens": pytest.approx(12.0)}
    assert fits["peak_gib"].coefficients == {"tokens": pytest.approx(1e-3)}
    assert fits["device_ms"].coefficients == pytest.approx(
        {"launch": 0.3, "bytes_of_tokens": 0.7, "collective_wire": 1e-6, "collective_start": 0.2}, rel=1e-6
    )
    assert fits["device_ms"].kinds == {"usual"}


def test_a_slower_memory_stretches_the_terms_of_bytes_only():
    fitted, size = fit_cells(COST, CELLS)["device_ms"], Size(4096, 2)
    parts = fitted.parts(size)
    assert parts["bytes_of_tokens"] == pytest.approx(2.8)
    assert fitted(size) == pytest.approx(sum(parts.values())) == pytest.approx(device_ms(size))
    assert fitted(size, 3.0) == pytest.approx(device_ms(size) + 2 * 2.8)
    assert fitted.communication(size) == pytest.approx(0.2 + 1e-6 * sent(size))
    assert fitted.communication(Size(4096)) == 0.0


def test_a_coefficient_is_never_negative():
    found = fit(lambda size: {"one": 1.0, "tokens": float(size.tokens)}, [Size(1), Size(2), Size(3)], [3.0, 2.0, 1.0])
    assert min(found.coefficients.values()) >= 0.0 and found.coefficients["one"] > 0
    empty = fit(lambda size: {"none": 0.0, "one": 1.0}, [Size(1), Size(2)], [2.0, 2.0])
    assert empty.coefficients["one"] == pytest.approx(2.0) and math.isfinite(empty(Size(1)))


def test_the_relative_error_is_least():
    """Ten times as large a value has no more weight: the fit of 1 and 12 by tokens of 1 and 10 is 1.1, not 1.2."""
    found = fit(lambda size: {"tokens": float(size.tokens)}, [Size(1), Size(10)], [1.0, 12.0])
    weights = 1 / 1.0, 10 / 12.0
    expected = sum(weights) / sum(each**2 for each in weights)
    assert found.coefficients["tokens"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("sizes", "separable"),
    [(SIZES, True), (SIZES[::2], False), ([Size(1024 * at, 2) for at in (1, 2, 5, 9)], False)],
)
def test_collectives_are_told_apart_if_some_cells_have_none(sizes, separable):
    fitted = fit_cells(COST, tuple(map(cell, sizes)))["device_ms"]
    assert fitted.separates_collectives == separable
    if sizes[0].tp_size > 1:
        assert fitted.communication(Size(4096, 2)) is None


def test_the_alternative_with_the_smallest_error_is_taken():
    other = SimpleNamespace(**{**vars(COST), "time_terms": (lambda size, sent: {"constant": 1.0}, time_terms)})
    assert "launch" in fit_cells(other, CELLS)["device_ms"].coefficients
    other.time_terms = tuple(reversed(other.time_terms))
    assert "launch" in fit_cells(other, CELLS)["device_ms"].coefficients


def test_a_wall_time_is_the_device_time_and_a_part_of_the_host_that_does_not_depend_on_bytes():
    """Cells of two hosts, one of which takes twice as long: more bytes must not seem to cost host time."""
    fits = fit_cells(COST, [cell(size, wall=0.2 if size.tokens < 4096 else 0.1) for size in SIZES])
    host = {
        tp: [fits["time_ms"](Size(1024 * tokens, tp)) - device_ms(Size(1024 * tokens, tp)) for tokens in (1, 16)]
        for tp in (1, 2)
    }
    assert all(values[0] == pytest.approx(values[1]) and 0.1 < values[0] < 0.2 for values in host.values())
    assert fits["time_ms"](Size(4096, 2), 3.0) == pytest.approx(fits["time_ms"](Size(4096, 2)) + 2 * 2.8)


def test_what_no_cell_has_is_not_fitted():
    bare = [dataclasses.replace(each, device_ms=None, bytes_communicated=None) for each in CELLS]
    assert set(fit_cells(COST, bare)) == {"peak_gib", "time_ms"}
    alone = [each for each in CELLS if each.size.tp_size == 1]
    assert "sent" not in fit_cells(COST, alone)
    one = [dataclasses.replace(bare[1], bytes_communicated=sent(bare[1].size)), *bare]
    assert fit_cells(COST, one)["sent"].coefficients == {"tokens": pytest.approx(12.0)}


# Models


def made(cells=CELLS, **fields):
    return VariantModel("v", tuple(cells), fit_cells(COST, cells), **fields)


def test_an_estimate_has_the_same_factor_below_and_above():
    found = Estimate(10.0, 0.25)
    assert (found.low, found.high, found.known) == (8.0, 12.5, True)
    assert Estimate(1.0, 0.5).known and not Estimate(1.0, 0.501).known


def test_a_prediction_within_the_measured_sizes():
    errors = {"time_ms": [0.1] * 10, "device_ms": [0.0] * 9 + [1.0], "peak_gib": []}
    found = made(errors=errors)(Size(4096, 2))
    assert found.device_ms.value == pytest.approx(device_ms(Size(4096, 2)))
    assert found.time_ms.value == pytest.approx(1.0 + device_ms(Size(4096, 2)))
    assert found.device_ms.error == pytest.approx(0.1) and found.time_ms.error == pytest.approx(0.1)  # 90% are below
    assert found.peak_gib.error == 1.0  # nothing is known about it
    assert found.bytes_communicated == pytest.approx(sent(Size(4096, 2)))
    assert found.communication_ms == pytest.approx(0.2 + 1e-6 * sent(Size(4096, 2)))


def test_on_one_rank_nothing_is_sent():
    found = made()(Size(4096, 1))
    assert (found.bytes_communicated, found.communication_ms) == (0.0, 0.0)
    silent = made([each for each in CELLS if each.size.tp_size == 1])
    assert silent(Size(4096, 1)).bytes_communicated == 0.0
    assert silent(Size(4096, 2)).bytes_communicated is None and silent(Size(4096, 2)).communication_ms is None
    assert made()(Size(4096, 2, "other")).bytes_communicated is None  # no cell of that kind tells it


def test_times_of_an_unknown_gpu_are_withheld_and_those_of_a_slower_one_are_stretched():
    withheld = made()(Size(4096, 2), None)
    assert withheld.time_ms is withheld.device_ms is withheld.communication_ms is None
    assert withheld.peak_gib.value == pytest.approx(4.096) and withheld.bytes_communicated > 0
    assert made()(Size(4096), 2.0).device_ms.value == pytest.approx(device_ms(Size(4096)) + 2.8)
    assert made()(Size(4096), 2.0).peak_gib.value == pytest.approx(4.096)


def test_no_iteration_ends_before_its_device():
    """Wall times were measured at other sizes, and their fit lies below the device times."""
    cells = [dataclasses.replace(each, time_ms=each.time_ms - 1.5) for each in CELLS]
    found = made(cells)(Size(4096, 2))
    assert found.time_ms.value == found.device_ms.value == pytest.approx(device_ms(Size(4096, 2)))
    later = made([dataclasses.replace(each, device_ms=None) for each in CELLS])(Size(4096, 2))
    assert later.device_ms is None and later.time_ms.value == pytest.approx(1.0 + device_ms(Size(4096, 2)))
    assert later.communication_ms is not None  # the wall time's


def test_an_error_grows_with_each_doubling_beyond_the_measured_sizes():
    errors = {name: [0.1] for name in ("time_ms", "device_ms", "peak_gib")}
    model = made(errors=errors)
    assert extrapolation_factors(CELLS, Size(1024, 2)) == extrapolation_factors(CELLS, Size(9216, 1)) == {}
    assert extrapolation_factors(CELLS, Size(256, 4)) == {"tokens": 4.0, "tp_size": 2.0}
    assert extrapolation_factors(CELLS, Size(9216 * 8, 1)) == {"tokens": 8.0}
    assert model(Size(256, 4)).peak_gib.error == pytest.approx(0.1 * (1 + 2 + 1))
    assert span(CELLS) == {"tokens": (1024, 9216), "tp_size": (1, 2)}
    assert span([cell(Size(7), status="oom"), *CELLS]) == span(CELLS) and span([]) == {}


def test_bounds_of_memory_come_from_cells_of_a_measured_kind():
    failed = (cell(Size(50_000), status="oom", limit=40.0), cell(Size(10, kind="other"), status="oom"))
    model = made(ran_out=failed)
    assert model.memory_bounds.largest_ok_gib == pytest.approx(0.5 + 9.216)
    assert model.memory_bounds.ran_out == (RanOut(pytest.approx(50.5), 40.0),)


def test_a_cell_is_left_out_with_all_cells_of_its_size():
    errors = leave_out(COST, CELLS)
    assert {name: len(each) for name, each in errors.items()} == {"time_ms": 8, "device_ms": 8, "peak_gib": 8}
    assert max(errors["peak_gib"]) < 1e-9
    wrong = [*CELLS[:-1], dataclasses.replace(CELLS[-1], peak_gib=2 * CELLS[-1].peak_gib)]
    assert leave_out(COST, wrong)["peak_gib"][-1] == pytest.approx(0.5)
    twice = leave_out(COST, [*CELLS, *CELLS])  # the copy of a cell does not predict it
    assert len(twice["peak_gib"]) == 16
    same = [cell(Size(1024)), cell(Size(1024)), cell(Size(2048))]
    assert leave_out(COST, same)["peak_gib"] == [pytest.approx(0.0, abs=1e-9)]  # only the last has two others
    gone = [dataclasses.replace(each, peak_gib=None) for each in CELLS[:1]] + list(CELLS[1:])
    assert len(leave_out(COST, gone)["peak_gib"]) == 7


def cells_of(*cells, gpu="GPU"):
    return MeasuredCells(COST, gpu, cells)


def test_a_model_needs_four_sizes_of_which_one_tells_the_memory():
    sizes = [Size(1024 * at) for at in (1, 2, 3, 4)]
    three = [cell(sizes[at]) for at in (0, 1, 2, 2)]
    assert models(cells_of(*three)) == {}
    four = [*three, cell(sizes[3])]
    assert set(models(cells_of(*four))) == {"v"}
    assert models(cells_of(*(dataclasses.replace(each, peak_gib=None) for each in four))) == {}
    assert models(cells_of(*three, cell(sizes[3], status="oom"))) == {}
    found = models(cells_of(*four, cell(sizes[3], "w"), cell(Size(9), "w", "oom"), cell(Size(99), status="oom")))
    assert set(found) == {"v"} and [each.size.tokens for each in found["v"].ran_out] == [99]
    assert found["v"].errors and not models(cells_of(*four), errors=False)["v"].errors


def test_facts_of_measured_cells():
    first, second, none = cell(Size(1), limit=80.0), cell(Size(2), limit=20.0), cell(Size(3), limit=None)
    failed = dataclasses.replace(none, status="oom")
    found = cells_of(first, second, failed, dataclasses.replace(second, status="oom", label="w"))
    assert found.memory_gib == 80.0 and found.copy_gb_per_s == 4000.0 and found.labels == ["v"]
    assert [each.memory_limit_gib for each in found.ran_out] == [80.0, 20.0]
    assert cells_of(failed).ran_out == [] and cells_of(failed).memory_gib is None
    assert cells_of(dataclasses.replace(first, copy_gb_per_s=None)).copy_gb_per_s is None
    many = cells_of(first, cell(Size(1), "w"), cell(Size(2), "w"))
    assert many.labels == ["w", "v"]


# Memory


@pytest.mark.parametrize(
    ("peak", "error", "outcome"),
    [(9.5, 0.0, "fits"), (9.6, 0.0, "OOM"), (8.0, 0.1875, "fits"), (8.0, 0.19, "tight"), (11.0, 0.1, "OOM")],
)
def test_the_error_bar_decides_about_memory(peak, error, outcome):
    assert memory_outcome(Size(), Estimate(peak, error), 10.0) == outcome


@pytest.mark.parametrize(
    ("needed", "outcome"), [(29.9, "fits"), (30.0, "fits"), (30.1, "tight"), (40.0, "OOM"), (50.0, "OOM")]
)
def test_measured_cells_bound_the_memory(needed, outcome):
    memory_bounds = MeasuredMemory(30.0, (RanOut(60.0, 52.0), RanOut(40.0, 52.0), RanOut(35.0, 12.0)))
    assert memory_bounds.outcome(needed, 50.0) == outcome
    assert memory_bounds.smallest_ran_out(52.5) == RanOut(40.0, 52.0)  # five percent above what that GPU had left
    assert memory_bounds.smallest_ran_out(52.6) is None and memory_bounds.outcome(needed, 52.6) == "fits"
    assert memory_bounds.smallest_ran_out(10.0) == RanOut(35.0, 12.0)
    between = MeasuredMemory(45.0, (RanOut(40.0, 52.0),))
    assert [between.outcome(each, 50.0) for each in (39.9, 42.0, 46.0)] == ["fits", "tight", "OOM"]


def test_the_reason_names_the_measured_cells():
    memory_bounds = MeasuredMemory(30.0, (RanOut(40.0, 52.0),))
    assert memory_reason(Size(), Estimate(39.5, 0.0), 50.0, memory_bounds) == (
        "with its inputs it needs 40.00 GiB, and a measured cell that needs 40.00 GiB ran out of memory within "
        "52.00 GiB"
    )
    tight = memory_reason(Size(), Estimate(30.5, 0.0), 50.0, memory_bounds)
    assert tight.endswith("within 52.00 GiB, the largest that ran needs 30.00 GiB")
    assert memory_reason(Size(), Estimate(60.0, 0.0), 50.0, memory_bounds) is None  # the prediction alone says so
    assert memory_reason(Size(), Estimate(10.0, 0.0), 50.0, memory_bounds) is None
    assert memory_reason(Size(), Estimate(39.5, 0.0), 50.0, MeasuredMemory()) is None


def test_a_model_in_training_takes_its_share():
    model = MODELS["8B"]
    states = 16 * 8.03e9 / 8
    gathered = 4 * 8.03e9 / 32 / 4
    checkpoints = 2 * 1000 * 4096 * 32 / 4
    working = 34 * 1000 * 4096 / 4
    taken = (states + gathered + checkpoints + working) / 2**30
    assert model.taken_gib(1000, 4) == pytest.approx(taken)
    assert free_gib(80.0, Size(1000, 4)) == 78.0
    assert free_gib(80.0, Size(1000, 4), model) == pytest.approx(78.0 - taken)


def test_a_cell_is_predicted_to_run_out():
    small = {"v": made(errors={"peak_gib": [0.1]})}
    assert predicted_oom(small, "v", Size(4096), 3.0) == (
        "predicted to run out of memory: 4.6 GiB (error 10.0%), 3 GiB free"
    )
    assert predicted_oom(small, "v", Size(4096), 4.5) is None  # it may fit
    assert predicted_oom(small, "w", Size(4096), 3.0) is None
    assert predicted_oom(small, "v", Size(4096, kind="other"), 3.0) is None


# The GPU in question


def test_the_gpu_in_question_is_that_of_the_rows_unless_something_says_otherwise(monkeypatch):
    cells = cells_of(*CELLS)
    assert target.find_target(cells) == target.Target(100.0, "GPU", True)
    for near, far in ((104.9, 105.1), (95.1, 94.9)):
        assert target.find_target(cells, memory_gib=near) == target.Target(near, "GPU", True)
        assert target.find_target(cells, memory_gib=far) == target.Target(far, "GPU", False, None)
    assert target.find_target(cells, gpu="GPU", memory_gib=10.0) == target.Target(10.0, "GPU", True)
    assert target.find_target(cells, bandwidth=2000.0) == target.Target(100.0, "GPU", False, 2.0)
    assert target.find_target(cells, bandwidth=3810.0).is_measured  # within five percent
    assert not target.find_target(cells, bandwidth=3800.0).is_measured
    assert target.find_target(cells, memory_gib=10.0, bandwidth=4000.0) == target.Target(10.0, "GPU", False, 1.0)
    slow = [dataclasses.replace(each, copy_gb_per_s=None, memory_limit_gib=None) for each in CELLS]
    assert target.find_target(cells_of(*slow), bandwidth=2000.0) == target.Target(80.0, "GPU", False, None)
    assert target.find_target(cells_of(*slow), memory_gib=40.0) == target.Target(40.0, "GPU", True)
    monkeypatch.setattr(target, "this_gpu", lambda: ("mine", 60.0))
    assert target.find_target(cells) == target.Target(60.0, "GPU", False, None, name="mine")
    for given in ({"gpu": "GPU"}, {"memory_gib": 100.0}, {"bandwidth": 4000.0}):
        assert target.find_target(cells, **given).name == "" and target.find_target(cells, **given).is_measured
    monkeypatch.setattr(target, "this_gpu", lambda: ("GPU", 60.0))
    assert target.find_target(cells).memory_gib == 100.0


def test_the_gpu_of_this_machine_is_the_first_of_nvml(monkeypatch, request):
    import contextlib

    def session(count):
        nvml = SimpleNamespace(
            nvmlDeviceGetCount=lambda: count, nvmlDeviceGetHandleByIndex=lambda index: ("first", "second")[index],
            nvmlDeviceGetName=lambda handle: handle.encode(),
            nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=80 * 2**30),
        )  # fmt: skip
        return lambda: contextlib.nullcontext(None if count is None else nvml)

    monkeypatch.undo()  # the stand-in of all other tests of this folder
    for count, found in ((2, ("first", 80.0)), (0, None), (None, None)):
        monkeypatch.setattr(target, "nvml_session", session(count))
        assert target.this_gpu() == found


@pytest.mark.parametrize(("text", "numbers"), [("2M", [2**21]), ("1", [1]), ("3K, 4", [3072, 4])])
def test_whole_numbers(text, numbers):
    assert whole_numbers(text) == numbers


def test_the_reserve_is_what_pages_say():
    assert f"{memory.RESERVE_GIB:g} GiB for CUDA" in memory.ASSUMPTION
    assert Fit(lambda size: {}, {}, frozenset()).communication(Size()) == 0.0
