"""The schema of rows: types of columns."""

import pyarrow as pa

from tpbench.results.schema import FLAG, INT, REAL, TEXT, workload_columns
from tpbench.workloads import workloads


def test_workload_columns_have_the_types_of_their_fields():
    types = {name: column.type for name, column in workload_columns()["entropy_loss"].items()}
    expected = {"seed": INT, "temperature": REAL, "compile": FLAG, "compute_dtype": TEXT}
    assert {name: types[name] for name in expected} == expected
    assert types["block_used"] == pa.null()  # a result: known from a value


def test_workloads_that_share_a_column_agree_on_its_type():
    kinds = {}
    for name in workloads():
        for column in workload_columns()[name].values():
            assert kinds.setdefault(column.name, column.type) == column.type, column.name
