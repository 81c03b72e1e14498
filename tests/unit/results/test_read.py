"""Written rows are read as they were written, and no broken file hides the other rows."""

import datetime
import json
import os
import pickle
import random
import threading
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tpbench
from tests.support.command import ROOT
from tpbench.job import parse_job
from tpbench.report.analysis.grid import arrange_rows
from tpbench.results import row_files as files
from tpbench.results.read import RowWarning, column_defaults, frame_of, load, plain_rows
from tpbench.results.row_files import has_right_checksum, with_checksum
from tpbench.results.schema import COLUMNS, INT, REALS, SCHEMA_VERSION, STATUSES, TEXT, all_columns, workload_columns
from tpbench.results.write import write_row
from tpbench.workloads import NAMES

MOMENTS = st.datetimes(datetime.datetime(1700, 1, 1), datetime.datetime(2026, 1, 1), timezones=st.just(datetime.UTC))
VALUES = {
    str: st.text(),
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats() | st.integers(-(2**53), 2**53),
    bool: st.booleans(),
    datetime.datetime: MOMENTS,
    list: st.lists(st.floats(), max_size=4),
}
OWN = {"row_id", "schema_version", "workload", "status", "datasheet_share"}
ROWS = st.fixed_dictionaries(
    {"workload": st.just("entropy_loss"), "status": st.sampled_from(sorted(STATUSES))},
    optional={column.name: st.none() | VALUES[column.type] for column in COLUMNS if column.name not in OWN},
)


def quietly(where):
    with warnings.catch_warnings():
        warnings.simplefilter("error", RowWarning)
        return load(where)


def complaints(where):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        frame = load(where)
    # Some releases of pyarrow warn of the extension type that they refuse to unpickle.
    return frame, [str(warning.message) for warning in caught if warning.category is RowWarning]


def store(table, file, version=SCHEMA_VERSION):
    """Write a table as a file of rows without a checksum."""
    pq.write_table(table.replace_schema_metadata({"tpbench.schema_version": str(version)}), file)


def same(written, found):
    if written is None:
        return found is None or found is pd.NaT or pd.isna(found)
    if isinstance(written, list):
        return np.array_equal(np.array(written, float), found, equal_nan=True)
    if isinstance(written, float) and np.isnan(written):
        return pd.isna(found)
    return bool(written == found)


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(ROWS, min_size=1, max_size=8))
def test_round_trip(tmp_path, rows):
    folder = tmp_path / os.urandom(8).hex()
    for index, made in enumerate(rows):
        write_row(made, folder, f"r{index}")
    frame, _ = complaints(folder)  # such times may be suspicious
    assert len(frame) == len(rows)
    stored = {row["row_id"]: row for row in frame.to_dict("records")}
    for index, made in enumerate(rows):
        for name, value in made.items():
            if value is not None or name not in ("tpbench_version", *column_defaults()["entropy_loss"]):
                text = value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
                assert same(text, stored[f"r{index}"][name]), (name, value, stored[f"r{index}"][name])


def test_an_empty_folder_is_a_tidy_frame(tmp_path):
    frame = quietly(tmp_path)
    assert frame.empty
    assert [name for name in frame.columns if name != "label"] == list(all_columns())
    assert frame["vocab"].dtype == pd.Int64Dtype()
    assert frame["interpreted"].dtype == pd.BooleanDtype()
    assert frame["time_ms"].dtype == np.float64
    assert frame["started_at"].dtype == pd.DatetimeTZDtype("us", "UTC")
    assert pd.api.types.is_string_dtype(frame["variant"].dtype)
    assert frame["seed"].dtype == pd.Int64Dtype()


def test_labels_name_the_options(tmp_path, row):
    """A pivot table by `label` does not average rows of different options, and no label is cut."""
    written = [{}, {"graph": True}, {"exchange": "nccl", "block_cap": "4096"}, {"variant": "pytorch_gather"}]
    for index, changes in enumerate(written):
        write_row(row(index, time_ms=1.0 + index, key=f"k{index}", **changes), tmp_path, f"r{index}")
    frame = quietly(tmp_path)
    labels = ["triton_tp", "triton_tp graph=true", "triton_tp block_cap=4096 exchange=nccl", "pytorch_gather"]
    assert sorted(frame.label) == sorted(labels)
    table = frame.pivot_table(index="vocab", columns="label", values="time_ms")
    assert table.iloc[0][labels].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert load(tmp_path, columns=["label"], time_ms=2.0).label.tolist() == [labels[1]]
    assert load(tmp_path, label=labels[2], columns=["time_ms"]).time_ms.tolist() == [3.0]
    columns = {each for grid in arrange_rows(frame) for each in grid.columns}
    assert columns == set(labels)


def test_one_workload_has_only_its_columns(tmp_path, row):
    write_row(row(0), tmp_path / "loss", "a")
    other = {"workload": "train_step", "variant": "ddp", "status": "ok", "key": "l", "mfu": 0.4}
    write_row(other, tmp_path / "train", "b")
    alone, both = quietly(tmp_path / "loss"), quietly(tmp_path)
    assert "mfu" not in alone and {"exchange", "spilled_bytes", "time_ms", "label"} <= set(alone)
    assert {"mfu", "exchange"} <= set(both)
    assert list(load(tmp_path, workload="entropy_loss").columns) == list(alone.columns)
    train = load(tmp_path, workload="train_step")
    assert train.mfu.tolist() == [0.4] and "exchange" not in train
    assert load(tmp_path / "loss", workload="train_step").columns.tolist() == train.columns.tolist()
    assert load(tmp_path / "loss", columns=["mfu"]).mfu.isna().all()


def test_places(tmp_path, row, monkeypatch):
    write_row(row(1), tmp_path / "outputs", "b")
    write_row(row(0), tmp_path / "outputs/reference", "a")
    write_row(row(2), tmp_path / "other", "c")
    (tmp_path / "outputs/rows/.hidden.parquet").write_bytes(b"half")
    (tmp_path / "outputs/.cache").mkdir()
    (tmp_path / "outputs/.cache/x.parquet").write_bytes(b"half")
    (tmp_path / "outputs/notes.txt").write_text("not a row")
    monkeypatch.chdir(tmp_path)
    assert quietly("outputs").row_id.tolist() == ["a", "b"]
    assert tpbench.load().row_id.tolist() == ["a", "b"]
    assert quietly("outputs/rows/b.parquet").row_id.tolist() == ["b"]
    assert quietly("o*/rows/*.parquet").row_id.tolist() == ["b", "c"]
    assert quietly("o*").row_id.tolist() == ["a", "b", "c"]
    assert quietly(["other", tmp_path / "outputs", "outputs/reference"]).row_id.tolist() == ["a", "b", "c"]
    assert quietly([]).empty
    for nowhere in ("nothing", "nothing*", ["outputs", "nothing"]):
        with pytest.raises(FileNotFoundError, match="nothing"):
            load(nowhere)


def test_files_that_differ_in_a_result_column_of_a_user(tmp_path):
    definition = {"name": "mine", "title": "", "fields": [], "columns": {"outcome": "a number, or a word"}}
    row = {"workload": "mine", "workload_definition": json.dumps(definition), "status": "ok"}
    for index, value in enumerate([4096, 0.5, None]):
        write_row({**row, "outcome": value}, tmp_path, f"r{index}")
    assert quietly(tmp_path).outcome.dropna().tolist() == [4096.0, 0.5]
    write_row({**row, "outcome": "many"}, tmp_path, "r3")
    assert "many" in quietly(tmp_path).outcome.tolist()


def test_lists_that_are_empty_in_some_file_stay_lists(tmp_path):
    write_row({"workload": "train_step", "status": "ok", "losses": [2.0, 1.0]}, tmp_path, "r0")
    lists = pa.list_(pa.field("element", pa.float64()))
    empty = pa.table({"row_id": ["r1"], "workload": ["train_step"], "losses": pa.nulls(1, lists)})
    store(empty, tmp_path / "empty.parquet")
    assert [*map(list, quietly(tmp_path).losses.dropna())] == [[2.0, 1.0]]


def flips(content, count, seed=0):
    """Yield copies of a file, each with one changed bit. Every place has the same chance."""
    chance = random.Random(seed)
    for _ in range(count):
        flipped = bytearray(content)
        flipped[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        yield bytes(flipped)


def test_copies_of_a_row_count_once_and_rows_are_in_the_order_in_which_they_were_made(tmp_path, row):
    for name, seconds, cell in (("z", 5, 1), ("y", 5, 0), ("x", 1, 9)):
        write_row(row(seconds, cell=cell), tmp_path, name)
    merged = pa.concat_tables(pq.read_table(path) for path in sorted((tmp_path / "rows").iterdir()))
    content = tmp_path / "merged.parquet"
    store(merged, content)
    assert quietly(tmp_path).row_id.tolist() == ["x", "y", "z"]
    content.write_bytes(with_checksum(content.read_bytes()))
    assert with_checksum(content.read_bytes()) == content.read_bytes()
    assert quietly(content).equals(quietly(tmp_path))


def test_a_flipped_bit_anywhere_in_a_row_file_is_named_and_skipped(tmp_path, row):
    content = write_row(row(), tmp_path / "whole", "r1").read_bytes()
    for index, flipped in enumerate(flips(content, 100)):
        (tmp_path / f"{index}.parquet").write_bytes(flipped)
    frame, said = complaints(tmp_path)
    assert frame.row_id.tolist() == ["r1"]
    assert {Path(sentence.split(": ")[0]).name for sentence in said} == {f"{index}.parquet" for index in range(100)}


COMMITTED = sorted((*(ROOT / "outputs").glob("*/rows/*.parquet"), *(ROOT / "tpbench").rglob("rows/*.parquet")))


@pytest.mark.parametrize("file", COMMITTED, ids=lambda file: file.name)
def test_a_flipped_bit_in_a_committed_file_is_noticed(file):
    content = file.read_bytes()
    assert with_checksum(content) == content
    assert has_right_checksum(content)
    assert not any(map(has_right_checksum, flips(content, 20)))


def test_bad_files_do_not_stop_the_others(tmp_path, row):
    """None of these files stops `load`, makes it wait or hides a good row; each is named."""
    write_row(row(), tmp_path, "good")
    surrogate = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(np.array([0, 3], "int32")), pa.py_buffer(b"\xed\xa0\x80")]
    )
    tables = {
        name: pa.table({"row_id": [name], "vocab": pa.array([1], pa.uint64())}) for name in ("fits", "older", "newer")
    }
    tables["overflows"] = pa.table({"row_id": ["x"], "vocab": pa.array([2**63], pa.uint64())})
    tables["surrogate"] = pa.table({"row_id": surrogate})
    tables["wrong"] = pa.table({"vocab": ["many"]})
    tables["twice"] = pa.table([pa.array([1]), pa.array([2])], names=["vocab", "vocab"])
    versions = {"older": -99999999, "newer": SCHEMA_VERSION + 1}
    for name, table in tables.items():
        store(table, tmp_path / f"{name}.parquet", versions.get(name, SCHEMA_VERSION))
    os.mkfifo(tmp_path / "pipe.parquet")
    (tmp_path / "endless.parquet").symlink_to("/dev/zero")
    (tmp_path / "\x1b[31m\nname.parquet").write_bytes(b"")
    frame, said = complaints(tmp_path)
    assert sorted(frame.row_id) == ["fits", "good"]
    reasons = {Path(sentence.split(": ")[0]).stem: sentence.partition("skipped, ")[2] for sentence in said}
    assert reasons.keys() == {*tables, "pipe", "endless", "[31m name"} - {"fits"}
    assert reasons["pipe"] == reasons["endless"] == "it is no regular file"
    assert all(f"it has version {version} of the schema" in reasons[name] for name, version in versions.items())
    assert "UTF8" in reasons["surrogate"] and "column vocab is string" in reasons["wrong"]
    assert all(sentence.isprintable() for sentence in said)


class Bomb:
    """Unpickled, it makes a folder."""

    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return (os.mkdir, (str(self.place),))


def test_foreign_files_are_named_and_not_evaluated(tmp_path, row):
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    write_row(row(), tmp_path, "good")
    pd.DataFrame({"time_ms": [1.0]}).to_parquet(tmp_path / "pandas.parquet")
    (tmp_path / "text.parquet").write_text("hello")
    (tmp_path / "folder.parquet").mkdir()
    metadata = {"pandas": bomb, "ARROW:extension:name": "arrow.py_extension_type"}
    field = pa.field("reason", pa.binary(), metadata={**metadata, "ARROW:extension:metadata": bomb})
    table = pa.table(
        [pa.array([b"x"])], schema=pa.schema([field], metadata={**metadata, "tpbench.schema_version": "2"})
    )
    pq.write_table(table, tmp_path / "hostile.parquet")
    frame, said = complaints(tmp_path)
    assert "good" in frame.row_id.tolist()
    named = sorted(Path(sentence.split(": ")[0]).name for sentence in said)
    assert named == ["pandas.parquet", "text.parquet"]
    assert frame.reason.dropna().tolist() == ["x"]
    assert not (tmp_path / "exploded").exists()


def test_the_key_is_of_the_stored_job(tmp_path, row):
    job = parse_job({"variant": "triton_tp", "tp_size": 2, "tokens": 64, "vocab": 1000})
    older = {name: value for name, value in job.flat().items() if name != "fresh"}
    for index, stored in enumerate([json.dumps(older), None, "{", "[]", "{}", '{"workload": []}', "[" * 10**5]):
        write_row(row(index, job=stored), tmp_path, f"r{index}")
    assert load(tmp_path).key.tolist() == [job.key, *6 * ["k"]] == load(tmp_path, columns=["key"]).key.tolist()
    assert load(tmp_path, key=job.key).row_id.tolist() == ["r0"] and load(tmp_path, columns=["job"]).shape == (7, 1)


def test_a_file_that_moves_into_another_is_found(tmp_path, row, monkeypatch):
    first = write_row(row(), tmp_path, "r1")
    original = files._read

    def moved(path):
        if path == first and first.exists():
            first.rename(first.with_name("merged.parquet"))
        return original(path)

    monkeypatch.setattr(files, "_read", moved)
    assert quietly(tmp_path).row_id.tolist() == ["r1"]


def test_a_writer_at_work(tmp_path, row):
    def work():
        for index in range(60):
            path = write_row(row(index), tmp_path, f"r{index}")
            if index % 3 == 0:
                path.unlink()

    writer = threading.Thread(target=work)
    writer.start()
    while writer.is_alive():
        quietly(tmp_path)
    assert len(quietly(tmp_path)) == 40


def test_a_row_that_is_older_than_a_field_has_the_fields_default(tmp_path):
    for at, row in enumerate(
        ({"workload": "tp_block"}, {"workload": "tp_block", "layers": 2}, {"workload": "train_step"})
    ):
        write_row({"row_id": str(at), "status": "ok", "cell": at, **row}, tmp_path, str(at))
    found = load(tmp_path)["layers"]
    assert found[:2].tolist() == [0, 2] and found[2:].isna().all(), "only rows of the field's workload"
    assert load(tmp_path, columns=["layers"]).dropna()["layers"].tolist() == [0, 2]
    assert len(load(tmp_path, layers=0)) == 1
    assert len(frame_of(plain_rows(load(tmp_path)))) == 3, "no row has a field of another workload"


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
    assert tpbench.load(rows, tp_size=[4, 8], variant=("triton_tp", "pytorch_tp_manual")).row_id.tolist() == ["r1"]
    assert tpbench.load(rows, reason=None).row_id.tolist() == ["r0", "r1", "r2", "r3"]
    assert tpbench.load(rows, interpreted=False, seed=7, compile=[False]).shape[0] == 4
    assert tpbench.load(rows, block_used=1).empty


def test_columns_only(rows):
    frame = tpbench.load(rows, columns=["time_ms", "variant", "time_ms"], tp_size=4)
    assert frame.columns.tolist() == ["time_ms", "variant"]
    assert frame.variant.tolist() == ["triton_tp", "pytorch_gather"]
    assert tpbench.load(rows, columns="time_ms").columns.tolist() == ["time_ms"]
    assert tpbench.load(rows, columns=[]).shape == (4, 0)


def test_the_share_of_a_datasheet_s_bandwidth(tmp_path, row):
    for at, (gpu, rate) in enumerate(
        [("NVIDIA H200", 2400.0), ("NVIDIA H100 PCIe", 1000.0), (None, 5.0), ("L40", 1.0)]
    ):
        write_row(row(at, gpu_name=gpu, gb_per_s=rate, key=str(at)), tmp_path, f"r{at}")
    assert load(tmp_path, columns="datasheet_share").datasheet_share.fillna(0).tolist() == [0.5, 0, 0, 0]


def test_what_does_not_exist(rows):
    with pytest.raises(ValueError, match="no column is called varient, did you mean variant"):
        tpbench.load(rows, varient="triton_tp")
    with pytest.raises(ValueError, match="no column is called time"):
        tpbench.load(rows, columns=["time"])
    with pytest.raises(ValueError, match=r"no variant is called tritn_tp, did you mean triton_tp\?"):
        tpbench.load(rows, variant="tritn_tp")
    with pytest.raises(ValueError, match=r"tp_size=2\.5: the column is int64"):
        tpbench.load(rows, tp_size=2.5)
    for place in (None, b"rows", {"rows": 1}, [rows, 2.5]):
        with pytest.raises(ValueError, match=r"a place of rows.* is (empty|of the type)"):
            tpbench.load(place)


def test_rows_that_another_program_wrote_back(tmp_path, rows):
    frame = tpbench.load(rows)
    frame.to_parquet(tmp_path / "pandas.parquet")
    pq.write_table(tpbench.load_table(rows).replace_schema_metadata(None), tmp_path / "arrow.parquet")
    for name in ("pandas", "arrow"):
        pd.testing.assert_frame_equal(tpbench.load(tmp_path / f"{name}.parquet"), frame)
    table = tpbench.load_table(rows)
    assert table.column_names == frame.columns.tolist()
    narrow = {INT: pa.int32(), TEXT: pa.large_string(), REALS: pa.large_list(pa.float64())}
    types = [narrow.get(kind, kind) for kind in table.schema.types]
    pq.write_table(table.cast(pa.schema(zip(table.column_names, types, strict=True))), tmp_path / "narrow.parquet")
    pd.testing.assert_frame_equal(tpbench.load(tmp_path), frame)  # beside the rows themselves
    frame.drop(columns="schema_version").to_parquet(tmp_path / "cut.parquet")
    _, said = complaints(tmp_path / "cut.parquet")
    assert "it is not tpbench's: it has no column schema_version" in said[0]


def test_workloads_that_share_a_column_agree_on_its_type():
    kinds = {}
    for name in NAMES:
        for column in workload_columns()[name].values():
            assert kinds.setdefault(column.name, column.type) == column.type, column.name
