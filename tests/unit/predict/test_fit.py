"""Fits of cost models with known coefficients, and predictions of models that are made by hand."""

import dataclasses

import pytest

from tpbench.predict import model
from tpbench.predict.cells import MeasuredCell, MeasuredCells
from tpbench.predict.model import LEAST_ERROR, Estimate, Fit, Prediction, VariantModel, models
from tpbench.workloads.entropy_loss.cost_model import Counts


@dataclasses.dataclass(frozen=True)
class Size:
    """A problem of a made-up workload."""

    tokens: int = 1024
    tp_size: int = 1
    vocab: int = 1
    kind: str = "usual"
    inputs_gib: float = 0.5


def counts(variant, size):
    sent = {"tokens": float(size.tokens)} if size.tp_size > 1 else {}
    time = {"launch": 1.0, "bytes_of_tokens": size.tokens / 1024}
    time |= {"collective_wire": float(size.tokens), "collective_start": 1.0} if sent else {}
    return Counts({"tokens": float(size.tokens)}, sent, time)


@pytest.fixture(autouse=True)
def made_up(monkeypatch):
    monkeypatch.setattr(model, "counts", counts)


SIZES = [Size(1024 * tokens, tp) for tokens in (1, 2, 5, 9) for tp in (1, 2)]


def sent(size):
    return 12.0 * size.tokens if size.tp_size > 1 else 0.0


def device_ms(size):
    return 0.3 + 0.7 * size.tokens / 1024 + ((0.2 + 1e-6 * sent(size)) if size.tp_size > 1 else 0.0)


def cell(size, label="v", wall=1.0):
    ms = device_ms(size)
    row = {
        "host": "a",
        "time_ms": wall + ms,
        "device_ms": ms,
        "peak_gib": 1e-3 * size.tokens,
        "bytes_communicated": sent(size),
    }
    return MeasuredCell(label, size, row)


CELLS = tuple(map(cell, SIZES))


def made(cells=CELLS):
    return VariantModel("v", cells)


def test_a_coefficient_is_never_negative():
    found = Fit([({"one": 1.0, "tokens": float(tokens)}, 4.0 - tokens) for tokens in (1, 2, 3)])
    assert min(found.coefficients.values()) >= 0.0 and found.coefficients["one"] > 0
    empty = Fit([({"none": 0.0, "one": 1.0}, 2.0)] * 2)
    assert empty({"none": 0.0, "one": 3.0}) == pytest.approx(6.0) and empty({"none": 1.0}) is None


def test_bytes_of_several_losses_have_a_coefficient_each():
    found = Fit([({"one": 1.0}, 1e9), ({"other": 1.0}, 2e9), ({"other": 2.0}, 4e9)])
    assert found({"one": 2.0}) == pytest.approx(2e9) and found({"other": 3.0}) == pytest.approx(6e9)


def test_what_the_measured_cells_do_not_determine_is_unknown():
    """Cells of one tp size do not tell launches and collectives apart; one size does not tell what grows with it."""
    over_two = made([cell for cell in CELLS if cell.size.tp_size == 2])
    assert over_two.value("device_ms", Size(4096, 2)) == pytest.approx(device_ms(Size(4096, 2)))
    assert not over_two(Size(4096, 1)).estimates["device_ms"].known
    assert over_two.value("peak_gib", Size(4096, 1)) == pytest.approx(4.096)
    one_size = Fit([({"one": 1.0, "tokens": 7.0}, 2.0)] * 3)
    assert one_size({"one": 2.0, "tokens": 14.0}) == pytest.approx(4.0)
    assert one_size.determines({"one": 2.0, "tokens": 14.0}) and not one_size.determines({"one": 1.0, "tokens": 9.0})
    assert Fit([])({"one": 1.0}) is None and Fit([])({}) == 0.0


def test_a_wall_time_is_the_device_time_and_a_part_of_the_host_that_does_not_depend_on_bytes():
    """Cells of two hosts, one of which takes twice as long: more bytes must not seem to cost host time."""
    fits = made([cell(size, wall=0.2 if size.tokens < 4096 else 0.1) for size in SIZES])
    host = {
        tp: [fits.value("time_ms", Size(1024 * tokens, tp)) - device_ms(Size(1024 * tokens, tp)) for tokens in (1, 16)]
        for tp in (1, 2)
    }
    assert all(values[0] == pytest.approx(values[1], abs=0.1) and 0.05 < values[0] < 0.25 for values in host.values())
    assert fits.value("time_ms", Size(4096, 2), 3.0) == pytest.approx(
        fits.value("time_ms", Size(4096, 2)) + 2 * 2.8, rel=0.02
    )


def test_on_one_rank_nothing_is_sent():
    assert made().value("bytes_communicated", Size(4096, 1)) == 0.0
    silent = made([each for each in CELLS if each.size.tp_size == 1])
    assert silent.value("bytes_communicated", Size(4096, 1)) == 0.0
    assert silent.value("bytes_communicated", Size(4096, 2)) is None


def test_a_model_needs_four_sizes():
    sizes = [Size(1024 * at) for at in (1, 2, 3, 4)]
    three = [cell(sizes[at]) for at in (0, 1, 2, 2)]
    assert models(MeasuredCells("GPU", three))[0] == {}
    found, left_out = models(MeasuredCells("GPU", [*three, cell(sizes[3]), cell(sizes[3], "w")]))
    assert set(found) == {"v"} and found["v"].errors["size", "device_ms"] == LEAST_ERROR
    assert set(left_out["axis"]) == {"size"}


@pytest.mark.parametrize(
    ("peak", "error", "outcome"),
    [(9.5, 0.0, "fits"), (9.6, 0.0, "OOM"), (8.0, 0.1875, "fits"), (8.0, 0.19, "tight"), (11.0, 0.1, "OOM"),
     (1.0, 0.6, "unknown")],
)  # fmt: skip
def test_the_error_bar_decides_about_memory(peak, error, outcome):
    assert Prediction(made(), Size(), {"peak_gib": Estimate(peak, error)}).memory(10.0) == outcome
