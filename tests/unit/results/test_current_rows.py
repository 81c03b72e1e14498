"""Which row of a cell is the newest, and which rows could mislead."""

import pyarrow as pa
import pytest

from tpbench.results.current_rows import hardware, newest, rows_with_missed_work
from tpbench.results.read import frame_of


def frame(*rows):
    return frame_of({"row_id": f"r{index}", **row} for index, row in enumerate(rows))


def kept(*rows):
    return newest(frame(*rows)).row_id.tolist()


def test_the_newest_of_a_key(row):
    assert kept(row(3), row(1), row(2, key="other")) == ["r2", "r0"]


def test_rows_of_other_hardware_are_other_cells(row):
    cpu = {"device": "cpu", "gpu_name": None, "cpu_model": "EPYC"}
    assert kept(row(1), row(2, gpu_name="NVIDIA H100"), row(3, **cpu), row(4, host="b")) == ["r1", "r2", "r3"]


def test_a_row_without_a_key_stays(row):
    assert kept(row(1, key=None), row(2, key=None), row(3)) == ["r0", "r1", "r2"]


def test_a_skipped_cell_is_replaced_by_its_run(row):
    skipped = row(1, status="skipped", device=None, gpu_name=None)
    assert kept(skipped, row(2)) == ["r1"]


VERSIONS = {"kernels_version": "a", "torch_version": "2", "triton_version": "3", "driver_version": "5"}


@pytest.mark.parametrize("status", ["error", "timeout", "skipped"])
@pytest.mark.parametrize(
    ("changed", "which"),
    [
        ({}, ["r0"]),
        ({"gpu_name": None, "driver_version": None}, ["r0"]),  # its job never began
        ({"kernels_version": "b"}, ["r1"]),
        ({"torch_version": None}, ["r1"]),
        ({"driver_version": "6"}, ["r1"]),
        ({"gpu_name": "NVIDIA H100"}, ["r0", "r1"]),
        ({"key": "other"}, ["r0", "r1"]),
    ],
)
def test_a_measurement_stands_until_something_has_changed(row, status, changed, which):
    assert kept(row(1, **VERSIONS), row(2, status=status, **(VERSIONS | changed))) == which


def test_a_measurement_stands_until_there_is_another(row):
    failed = [row(at, status="error", **VERSIONS) for at in (1, 3, 6)]
    oom, wrong = row(2, status="oom", **VERSIONS), row(4, status="wrong", **VERSIONS)
    assert kept(*failed, oom, wrong) == ["r4"]
    assert kept(*failed) == ["r2"]


def test_a_skipped_cell_has_no_hardware_if_the_other_rows_differ(row):
    rows = row(1, gpu_name=None), row(2), row(3, gpu_name="NVIDIA H100")
    assert kept(*rows) == ["r0", "r1", "r2"]
    place = hardware(frame(*rows))
    assert place["hardware"].isna().tolist() == [True, False, False]


def table(*rows):
    kinds = {"row_id": pa.string()}
    kinds |= dict.fromkeys(("time_ms", "launch_ms", "device_ms"), pa.float64())
    return pa.Table.from_pylist(list(rows), schema=pa.schema(list(kinds.items())))


def test_rows_whose_device_works_for_long_after_a_step_has_returned_are_named():
    honest = {"row_id": "a", "time_ms": 3.05, "launch_ms": 1.0, "device_ms": 1.0}
    assert (
        rows_with_missed_work(
            table(honest, {"row_id": "b", "time_ms": 9.0}, {**honest, "row_id": "c", "launch_ms": None})
        )
        == []
    )
    (sentence,) = rows_with_missed_work(table(honest, {**honest, "row_id": "d", "time_ms": 3.15}))
    assert sentence.startswith("row d: the device works for more than twice device_ms after a step has returned")
