"""A row is on disk whole and once, or not at all."""

import datetime
import errno
import os
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import tpbench
from tpbench.results.schema import SCHEMA_VERSION, RowError
from tpbench.results.write import RowExists, row_path, write_row

ROOT = Path(__file__).parents[3]


def files(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_it_lies_where_it_should(tmp_path, row):
    assert not row_path(tmp_path, "r1").is_file()
    path = write_row(row(), tmp_path, "r1")
    assert path == tmp_path / "rows" / "r1.parquet"
    assert row_path(tmp_path, "r1").is_file()
    assert files(tmp_path) == ["r1.parquet"]
    stored = pq.read_table(path).to_pylist()[0]
    assert stored["row_id"] == "r1"
    assert stored["schema_version"] == SCHEMA_VERSION
    assert stored["tpbench_version"] == tpbench.__version__
    assert "reason" not in stored
    assert pq.read_metadata(path).metadata[b"tpbench.schema_version"] == str(SCHEMA_VERSION).encode()


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"time_mss": 1.0}, "no column is called time_mss, did you mean time_ms"),
        ({"status": "fine"}, "no status is called fine"),
        ({"vocab": 1.5}, "vocab=1.5 is a float"),
        ({"vocab": True}, "vocab=True is a bool"),
        ({"block_cap": 4096}, "block_cap=4096 is a int"),
        ({"time_ms": 2**53 + 1}, "time_ms=9007199254740993 does not fit"),
        ({"samples_ms": [1.0, "a"]}, "samples_ms"),
        ({"samples_ms": 1.0}, "samples_ms=1.0"),
        ({"started_at": datetime.datetime(2026, 1, 1)}, "is a datetime: the column is timestamp[us, tz=UTC]"),
        ({"job": {"a": 1}}, "job={'a': 1} is a dict"),
        ({"workload": "nothing"}, "no column is called seed"),
    ],
)
def test_what_does_not_fit_is_named_and_leaves_nothing(tmp_path, row, changes, said):
    with pytest.raises(RowError) as caught:
        write_row(row(**changes), tmp_path, "r1")
    assert said in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("row_id", ["", ".hidden", "../up", "a/b", "a\n", "x" * 201])
def test_a_row_id_is_a_file_name(tmp_path, row, row_id):
    with pytest.raises(RowError):
        write_row(row(), tmp_path, row_id)


def test_numpy_values_and_broken_text(tmp_path, row):
    changes = {"time_ms": np.float32(0.5), "tokens": np.int64(3), "interpreted": np.bool_(True)}
    changes |= {"samples_ms": np.array([1.0, 2.0]), "reason": "bytes \udcff of no text"}
    stored = pq.read_table(write_row(row(**changes), tmp_path, "r1")).to_pylist()[0]
    assert stored["time_ms"] == 0.5 and stored["tokens"] == 3 and stored["interpreted"] is True
    assert stored["samples_ms"] == [1.0, 2.0]
    assert stored["reason"] == "bytes \\udcff of no text"


@pytest.fixture(params=["link", "rename"])
def publication(request, monkeypatch):
    """The two ways to publish a file: on a file system with hard links, and on one without."""
    if request.param == "rename":

        def no_link(*_):
            raise OSError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "link", no_link)


def test_the_first_writer_wins(tmp_path, row, publication):
    path = write_row(row(time_ms=1.0), tmp_path, "r1")
    with pytest.raises(RowExists):
        write_row(row(time_ms=2.0), tmp_path, "r1")
    assert pq.read_table(path).to_pylist()[0]["time_ms"] == 1.0
    assert files(tmp_path) == ["r1.parquet"]


def test_a_link_whose_answer_was_lost_is_ours(tmp_path, row, monkeypatch):
    link = os.link

    def twice(source, target):
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", twice)
    assert write_row(row(), tmp_path, "r1").is_file()


def test_a_failing_fsync_leaves_nothing(tmp_path, row, monkeypatch):
    def fails(_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="Input/output"):
        write_row(row(), tmp_path, "r1")
    assert files(tmp_path) == []
