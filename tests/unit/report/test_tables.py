"""One table in every format: numbers stand right, no text from a row acts on a reader, and CSV has all digits."""

import csv
import io
import json
import math

import pytest
from rich.console import Console

from tpbench.report.pivot import pivot
from tpbench.report.studies import study_document
from tpbench.tables import Document, Table, TableCell, as_csv, as_json, as_markdown, as_text

HOSTILE = (
    "=cmd|'/c calc'!A1 \x1b[31m\x1b]0;owned\x07[bold]x[/] <script>alert(1)</script> **b** `c` \u202e\r\n"
    "# h www.a.b http://c.d"
)
NUMBERS = (
    "7", "-2.32%", "9.54e-07", "0.303 ms (1.00x)", "0.160 ms† (1.00x)", "0.122*", "12.5x", "8611 tokens/s",
    "4.096 ms†‡ [device 2.799] (1.49x)", "3.830 ms +-22%", "0.98 to 1.02", "3, 4", "1.5 GB/s",
)  # fmt: skip
WORDS = (
    "", "-", "OOM", "ok†", "fp32", "0.6B", "1.41x ddp", "2436602295c6", "3e684047", "2.28.9", "v1",
    "3 steps by one process", "2026-11-20 10:00",
)  # fmt: skip
TABLE = Table(
    "heading",
    ("variant", "status", "time", "note"),
    [("triton_tp", "ok", TableCell("0.3 ms", 0.25, "best"), "-"), ("\u6f22\u5b57", "oom", "OOM", "-")],
    {"tokens": "64"},
    ["a note"],
)


@pytest.mark.parametrize("text", [*NUMBERS, *WORDS])
def test_numbers_and_words(text):
    assert Table("", ["a"], [[text]]).numeric[0] == (text in NUMBERS)


def test_words_stand_left_and_numbers_right():
    assert as_text(Document([TABLE], "caption", ["legend"], ["careful"])).plain.splitlines() == [
        "caption",
        "",
        "heading",
        "  variant    status    time  note",
        "  triton_tp  ok      0.3 ms  -",
        "  \u6f22\u5b57       oom        OOM  -",
        "a note",
        "",
        "legend",
        "Warning: careful",
    ]
    made = as_markdown(Document([TABLE], warnings=["careful"]))
    assert "| :--- | :--- | ---: | :--- |" in made and made.endswith("- a note\n\n- Warning: careful\n")


def test_csv_has_facts_and_all_digits():
    other = Table("", ("variant", "speed"), [("=x", TableCell("2", 2))])
    assert as_csv(Document([TABLE, other])).splitlines() == [
        "tokens,variant,status,time,speed",
        "64,triton_tp,ok,0.25,",
        "64,\u6f22\u5b57,oom,OOM,",
        ",'=x,,,2",
    ]


def test_csv_of_a_quantity_has_ratios_and_notes():
    cells = [TableCell("1.0 ms", 1.0, ratio=(1.0, None, None)), TableCell("OOM", "oom", note="oom, no room")]
    table = Table("", ("vocab", "a", "b"), [["7", *cells]], keys=1, quantity="time_ms")
    extreme = Table("", ("rows", "a"), [[TableCell("7", 7), TableCell("inf", math.inf)]], {"tokens": 64, "name": "64"})
    assert json.loads(as_json(Document([extreme]))) == [{"tokens": 64, "name": "64", "rows": 7, "a": "inf"}]
    assert as_csv(Document([table], warnings=["careful"])).splitlines() == [
        "vocab,a time_ms,a x,b time_ms,notes",
        '7,1.0,1.0,oom,"b: oom, no room"',
        ",,,,Warning: careful",
    ]


@pytest.fixture(params=["pivot", "study", "columns"])
def hostile(add, frame, request):
    """A document of rows whose texts act on a terminal, a browser, a renderer of Markdown or a spreadsheet."""
    names = {"gpu_name": HOSTILE, "dtype": HOSTILE, "loss": HOSTILE, "block_cap": HOSTILE}
    add(HOSTILE, status="error", reason=HOSTILE, job={HOSTILE: 1}, **names)
    add(HOSTILE, status="error", reason=HOSTILE, job={HOSTILE: HOSTILE}, **names)
    add("triton_tp", 1.0, loss_value=1.0, **names)
    add(HOSTILE, 1.0, loss_value=99.0, **names)
    columns = ("time_ms", "block_cap") if request.param == "columns" else ()
    document = pivot(frame()) if request.param == "pivot" else study_document(frame(), "block_cap", columns)
    assert document.warnings and "'/c calc'" in as_text(document).plain
    return document


def test_hostile_text_in_a_terminal(hostile):
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=2000)
    console.print(as_text(hostile), soft_wrap=True)
    printed = console.file.getvalue()
    assert not {char for char in printed if not char.isprintable()} - {"\n"}
    assert printed == f"{as_text(hostile).plain}\n"  # no text is taken for a style


def test_hostile_text_in_markdown(hostile):
    made = as_markdown(hostile)
    assert "<" not in made and "http:" not in made and "**b**" not in made and "`c`" not in made.replace("\\`", "")
    table = [line for line in made.splitlines() if line.startswith("|")]
    assert len({line.replace("\\|", "").count("|") for line in table}) == 1
    assert not any(line.startswith("#") for line in made.splitlines())


def test_hostile_text_in_csv(hostile):
    rows = list(csv.reader(io.StringIO(as_csv(hostile))))
    assert len({len(row) for row in rows}) == 1
    assert all(value.isprintable() and not value.startswith(("=", "+", "-", "@")) for row in rows for value in row)
