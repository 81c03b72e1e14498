"""Limits and counts of stored rows: what is cut, converted, and counted in a message."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

from tpbench.results import row_files as files
from tpbench.results.columns import FLAG, INT, REAL, REALS, TEXT
from tpbench.results.current_rows import changes, hardware, is_replaced_by, suspicious_rows
from tpbench.results.read import plain_rows
from tpbench.results.row_files import is_damaged, row_files, with_checksum
from tpbench.results.schema import type_from_hint, type_of
from tpbench.results.write import INDEX, add_to_index, is_merged
from tpbench.suggestions import printable


def test_a_long_text_keeps_its_start_and_more_of_its_end() -> None:
    assert printable("x" * 200) == "x" * 200
    cut = printable("a" * 100 + "b" * 101)
    assert cut == "a" * 66 + " ... " + "a" * 33 + "b" * 101
    assert printable("ab" * 20, 30) == ("ab" * 20)[:10] + " ... " + ("ab" * 20)[-20:]
    huge = printable("a" * 1000 + "b" * 1001)  # cut before it is looked at
    assert huge == "a" * 66 + " ... " + "b" * 134
    assert printable("\x1b[31mred\u202e \ud800\n\tend") == "[31mred end"


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (True, FLAG), (1, INT), (1.0, REAL), ("a", TEXT), ([1, 2.5], REALS), ((1,), REALS), ([], REALS),
        ([1, True], None), (["a"], None), ({}, None), (None, None),
    ],
)  # fmt: skip
def test_types_of_values(value: Any, kind: Any) -> None:
    assert type_of(value) == kind


@pytest.mark.parametrize(
    ("hint", "kind"),
    [(int, INT), (float | None, REAL), (int | str, TEXT), (bool, FLAG), (list, TEXT), (int | float, TEXT)],
)
def test_types_of_hints(hint: Any, kind: Any) -> None:
    assert type_from_hint(hint) == kind


def table(*rows: dict[str, Any]) -> pa.Table:
    kinds = {"row_id": pa.string(), "value": pa.float64()}
    kinds |= dict.fromkeys(("time_ms", "launch_ms", "device_ms"), pa.float64())
    kinds |= dict.fromkeys(("started_at", "finished_at"), pa.timestamp("us", tz="UTC"))
    return pa.Table.from_pylist(list(rows), schema=pa.schema(list(kinds.items())))


NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


@pytest.mark.parametrize("name", ["started_at", "finished_at"])
def test_rows_are_from_the_future_two_years_ahead(name: str) -> None:
    ahead = NOW + datetime.timedelta(days=730)
    assert suspicious_rows(table({"row_id": "a", name: ahead}), NOW) == []
    later = ahead + datetime.timedelta(seconds=1)
    (one,) = suspicious_rows(table({"row_id": "a", name: later}, {"row_id": "b"}), NOW)
    assert one.startswith("row a: dated years ahead")
    (three,) = suspicious_rows(table(*({"row_id": each, name: later} for each in "abc")), NOW)
    assert three.startswith("row a and 2 more: dated years ahead")


def test_copies_of_a_row_are_no_different_rows() -> None:
    copies = [{"row_id": "a", "value": float("nan")}] * 2
    assert suspicious_rows(table(*copies, {"row_id": "b"}, {"row_id": None}, {"row_id": None}), NOW) == []
    (sentence,) = suspicious_rows(table(*copies, {"row_id": "a", "value": 1.0}, {"row_id": "b", "value": 2.0}), NOW)
    assert sentence == "row a: different rows with one row_id; reports may show any of them"


def test_rows_whose_device_works_for_long_after_a_step_has_returned_are_named() -> None:
    honest = {"row_id": "a", "time_ms": 3.05, "launch_ms": 1.0, "device_ms": 1.0}
    assert (
        suspicious_rows(table(honest, {"row_id": "b", "time_ms": 9.0}, {**honest, "row_id": "c", "launch_ms": None}))
        == []
    )
    (sentence,) = suspicious_rows(table(honest, {**honest, "row_id": "d", "time_ms": 3.15}))
    assert sentence.startswith("row d: the device works for more than twice device_ms after a step has returned")


def place(*rows: tuple[str | None, str | None, str | None]) -> list[tuple[Any, Any]]:
    frame = pd.DataFrame(rows, columns=["device", "gpu_name", "cpu_model"], dtype="string")
    found = plain_rows(hardware(frame))
    return [(each["device"], each["hardware"]) for each in found]


def test_a_cell_that_never_ran_gets_the_hardware_of_the_others_if_there_is_one() -> None:
    ran, skipped, no_model = ("cuda", "A", "cpu"), (None, None, None), ("cuda", None, "cpu")
    assert place(ran, skipped, no_model) == [("cuda", "A")] * 3
    assert place(ran, ("cuda", "B", "cpu"), skipped, no_model)[2:] == [(None, None), ("cuda", None)]
    assert place(ran, ("cpu", None, "C"), skipped, no_model) == [
        ("cuda", "A"),
        ("cpu", "C"),
        (None, None),
        ("cuda", "A"),
    ]


def row(**fields: Any) -> dict[str, Any]:
    names = ("device", "gpu_name", "driver_version", "cpu_model", "kernels_version", "torch_version", "triton_version")
    usual = {**dict.fromkeys(names, "x"), "device": "cuda", "status": "error", "key": "k", "finished_at": 1}
    return usual | fields


def test_changes_of_software_and_hardware() -> None:
    facts = row(torch_version="y", gpu_name="z", cpu_model="other")
    assert changes(row(), facts) == ["torch_version", "gpu_name"]
    assert changes(row(gpu_name=None), facts) == ["torch_version"]
    assert changes(row(device="cpu"), facts) == ["torch_version", "cpu_model"]
    assert changes(row(device=None), facts) == ["torch_version", "gpu_name"]
    assert changes(row(), {"triton_version": "x"}) == []


@pytest.mark.parametrize(
    ("mine", "other", "replaced"),
    [
        ({}, {"status": "ok"}, True),
        ({}, {"status": "oom", "finished_at": 0}, True),
        ({"status": "ok"}, {"status": "ok", "finished_at": 2}, False),
        ({}, {"status": "ok", "key": "other"}, False),
        ({}, {"status": "ok", "key": "a"}, False),
        ({}, {"status": "error", "finished_at": 2}, True),
        ({}, {"status": "error", "finished_at": 1}, False),
        ({"finished_at": None}, {"status": "error", "finished_at": 2}, False),
        ({}, {"status": "ok", "torch_version": "other"}, False),
        ({}, {"status": "ok", "torch_version": None}, True),
    ],
)
def test_a_row_without_a_measurement_is_replaced(mine: dict[str, Any], other: dict[str, Any], replaced: bool) -> None:
    assert is_replaced_by(row(**mine), row(**other)) == replaced


def test_a_checksum_lies_before_the_footer_and_covers_all_bytes() -> None:
    footer = b"FOOT"
    content = b"PAR1data" + footer + len(footer).to_bytes(4, "little") + b"PAR1"
    summed = with_checksum(content)
    assert with_checksum(summed) == summed and summed.startswith(b"PAR1data") and summed.endswith(content[-12:])
    assert summed != content
    assert not is_damaged(summed) and not is_damaged(content)
    for at in range(len(summed)):
        assert is_damaged(summed[:at] + bytes([summed[at] ^ 1]) + summed[at + 1 :]), at


def test_an_index_of_merged_rows_ends_a_torn_line(tmp_path: Path) -> None:
    assert not is_merged(tmp_path, "a")
    add_to_index(tmp_path, ["a", "b"])
    assert is_merged(tmp_path, "a") and is_merged(tmp_path, "b") and not is_merged(tmp_path, "ab")
    with (tmp_path / INDEX).open("a") as file:
        file.write("tor")
    add_to_index(tmp_path, ["c"])
    assert (tmp_path / INDEX).read_text() == "a\nb\ntor\nc\n" and is_merged(tmp_path, "c")
    add_to_index(tmp_path, ["d"])
    assert (tmp_path / INDEX).read_text() == "a\nb\ntor\nc\nd\n"


def test_hidden_files_and_folders_hold_no_rows(tmp_path: Path) -> None:
    for name in ("a.parquet", ".b.parquet", "c.txt", ".d/e.parquet", "f/g.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [each.relative_to(tmp_path).as_posix() for each in row_files(tmp_path)] == ["a.parquet", "f/g.parquet"]
    assert row_files([tmp_path, str(tmp_path / "*.parquet"), tmp_path / "c.txt"])[-1].name in ("g.parquet", "c.txt")
    assert len(row_files([tmp_path / "a.parquet", tmp_path])) == 2
    with pytest.raises(FileNotFoundError, match="no such folder or file"):
        row_files(tmp_path / "x*")


def test_a_file_that_cannot_be_opened_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert files._content(tmp_path / "gone") is None
    assert str(files._content(tmp_path)) in ("it is no regular file", "it cannot be opened: Is a directory")
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    with (tmp_path / "large").open("wb") as large:
        large.truncate(2**32 + 1)  # a hole: it takes no room
    assert str(files._content(tmp_path / "large")) == "it is larger than 4294967296 bytes"
    monkeypatch.setattr(files, "_MAX_BYTES", 5)
    assert files._content(file) == b"12345"
    monkeypatch.setattr(files, "_MAX_BYTES", 4)
    assert str(files._content(file)) == "it is larger than 4 bytes"

    def fails(*_: Any) -> int:
        raise MemoryError("none left")

    monkeypatch.setattr(files.os, "open", fails)
    assert str(files._content(file)) == "it cannot be opened: none left"
