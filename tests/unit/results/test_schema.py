"""The schema of rows: types of columns."""

from tpbench.results.schema import workload_columns
from tpbench.workloads import workloads


def test_workloads_that_share_a_column_agree_on_its_type():
    kinds = {}
    for name in workloads():
        for column in workload_columns()[name].values():
            assert kinds.setdefault(column.name, column.type) == column.type, column.name
