"""`python -m tpbench.results.document > outputs/SCHEMA.md`: the page that describes every column of a row."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import pyarrow as pa

from tpbench.results.columns import Column
from tpbench.results.schema import SCHEMA_VERSION, STATUSES, common_columns, workload_columns

_TYPES = {"string": "text", "int64": "whole number", "double": "number", "bool": "true or false"}
_HEAD = f"""\
# Columns of a row

Made by `python -m tpbench.results.document`; schema version {SCHEMA_VERSION}. A row is one cell of a sweep, one Parquet
file `rows/ROW_ID.parquet`. Any column may be empty: a cell that was skipped has no time. A result of a workload has the
type of the value that the workload reported, so no type stands beside it.

```python
import tpbench

tpbench.load("outputs")  # pandas; folders, files, globs or a list of these
tpbench.load("outputs", status="ok", tp_size=[2, 4], columns=["variant", "vocab", "time_ms"])
tpbench.load_table("outputs", workload="entropy_loss")  # the same as an Arrow table, for DuckDB or polars
```

`load` adds the column `label` after `variant`: the variant with those options that are not the defaults, as reports
name it. Rows of different options have different labels, so use `pivot_table(columns="label")`. If all rows are of one
workload, the frame has only that workload's columns.
"""


def page() -> str:
    """Return the whole page, as Markdown."""
    parts = [_HEAD, "## Every row\n", _table(common_columns().values())]
    for workload, columns in workload_columns().items():
        parts += [f"## Further columns of {workload}\n", _table(columns.values())]
    statuses = "\n".join(f"| `{name}` | {meaning} |" for name, meaning in STATUSES.items())
    parts += ["## status\n", f"| status | meaning |\n| --- | --- |\n{statuses}\n"]
    return "\n".join(parts)


def _table(columns: Iterable[Column]) -> str:
    lines = ["| column | type | unit | meaning |", "| --- | --- | --- | --- |"]
    for column in columns:
        meaning = column.doc.replace("|", "\\|")
        lines.append(f"| `{column.name}` | {_type(column.type)} | {column.unit} | {meaning} |")
    return "\n".join(lines) + "\n"


def _type(kind: pa.DataType) -> str:
    if pa.types.is_timestamp(kind):
        return "time, UTC"
    if pa.types.is_list(kind):
        return "list of numbers"
    return _TYPES.get(str(kind), "")


if __name__ == "__main__":
    sys.stdout.write(page())
