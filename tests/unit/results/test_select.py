"""Rows and columns chosen while reading, as pandas and as Arrow."""

import pyarrow as pa
import pytest

import tpbench
from tpbench.results.write import write_row


@pytest.fixture
def rows(tmp_path, row):
    for index, (variant, tp_size, status) in enumerate(
        [("triton_tp", 2, "ok"), ("triton_tp", 4, "ok"), ("pytorch_gather", 4, "oom"), ("pytorch_gather", 2, "ok")]
    ):
        write_row(row(index, variant=variant, tp_size=tp_size, status=status), tmp_path, f"r{index}")
    return tmp_path


def test_values_and_lists_of_values(rows):
    assert tpbench.load(rows, status="ok").row_id.tolist() == ["r0", "r1", "r3"]
    assert tpbench.load(rows, status="ok", tp_size=2).row_id.tolist() == ["r0", "r3"]
    assert tpbench.load(rows, tp_size=[4, 8], variant=("triton_tp", "x")).row_id.tolist() == ["r1"]
    assert tpbench.load(rows, reason=None).row_id.tolist() == ["r0", "r1", "r2", "r3"]
    assert tpbench.load(rows, interpreted=False, seed=7, compile=[False]).shape[0] == 4
    assert tpbench.load(rows, block_used=1).empty


def test_columns_only(rows):
    frame = tpbench.load(rows, columns=["time_ms", "variant", "time_ms"], tp_size=4)
    assert frame.columns.tolist() == ["time_ms", "variant"]
    assert frame.variant.tolist() == ["triton_tp", "pytorch_gather"]
    assert tpbench.load(rows, columns=[]).shape == (4, 0)


def test_the_same_as_arrow(rows):
    table = tpbench.load_table(rows, status="ok")
    assert isinstance(table, pa.Table) and table.column("row_id").to_pylist() == ["r0", "r1", "r3"]
    assert table.column("samples_ms").to_pylist()[0] == [0.2, 0.227, 0.3]
    assert table.column_names == tpbench.load(rows).columns.tolist()


def test_many_folders_and_globs(rows):
    assert len(tpbench.load([rows / "rows", rows / "rows" / "r0.parquet"])) == 4
    assert len(tpbench.load(f"{rows}/rows/r[12].parquet")) == 2


def test_what_does_not_exist(rows):
    with pytest.raises(ValueError, match="no column is called varient, did you mean variant"):
        tpbench.load(rows, varient="triton_tp")
    with pytest.raises(ValueError, match="no column is called time"):
        tpbench.load(rows, columns=["time"])
    with pytest.raises(ValueError, match="tp_size='two': the column is int64"):
        tpbench.load(rows, tp_size="two")
