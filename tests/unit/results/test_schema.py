"""The schema says what the issue promised, and does not change behind its version's back."""

import pyarrow as pa
import pytest

from tpbench.results.columns import COLUMNS, FLAG, INT, REAL, TEXT
from tpbench.results.schema import (
    STATUSES,
    all_columns,
    common_columns,
    type_from_hint,
    workload_columns,
)
from tpbench.workloads import workloads

PROMISED = {
    "workload",
    "variant",
    "status",
    "reason",
    "tokens",
    "vocab",
    "tp_size",
    "dp_size",
    "loss",
    "block_cap",
    "dtype",
    "device",
    "interpreted",
    "time_ms",
    "device_ms",
    "floor_ms",
    "fraction_of_floor",
    "gb_per_s",
    "peak_gib",
    "loss_value",
    "loss_error",
    "grad_error",
    "samples_ms",
}
UNITS = {"_ms": "ms", "_s": "s", "_gib": "GiB", "gb_per_s": "GB/s", "_mhz": "MHz"}


def test_promised_columns_are_there():
    assert not PROMISED - set(common_columns())


def test_statuses():
    assert list(STATUSES) == ["ok", "oom", "wrong", "timeout", "error", "skipped"]
    assert all(STATUSES.values())


def test_names_are_unique_and_described():
    assert len({column.name for column in COLUMNS}) == len(COLUMNS)
    assert all(column.doc for column in all_columns().values())


def test_a_unit_ends_the_name():
    for column in COLUMNS:
        endings = [unit for ending, unit in UNITS.items() if column.name.endswith(ending)]
        assert not endings or column.unit == endings[-1], column.name


def test_workload_columns_have_the_types_of_their_fields():
    columns = workload_columns()["entropy_loss"]
    types = {name: column.type for name, column in columns.items()}
    assert types["seed"] == INT
    assert types["temperature"] == REAL
    assert types["compile"] == FLAG
    assert types["compute_dtype"] == TEXT
    assert types["block_used"] == pa.null()  # a result: known from a value


def test_workloads_that_share_a_column_agree_on_its_type():
    kinds = {}
    for name in workloads():
        for column in workload_columns()[name].values():
            assert kinds.setdefault(column.name, column.type) == column.type, column.name


@pytest.mark.parametrize("hint, kind", [(int | None, INT), (str, TEXT), (list[int], TEXT)])
def test_type_from_hint(hint, kind):
    assert type_from_hint(hint) == kind
