"""Every format shows the same cells, and no text from a row acts on a reader."""

import csv
import io
from pathlib import Path

import pytest
from rich.console import Console
from tpbench.report.tables import render

from tpbench.report.command import TABLES
from tpbench.report.pivot import pivot

GOLDEN = Path(__file__).parent / "golden"
SUFFIXES = {"text": "txt", "markdown": "md", "csv": "csv"}
HOSTILE = (
    "=cmd|'/c calc'!A1 \x1b[31m\x1b]0;owned\x07[bold]x[/] <script>alert(1)</script> **b** `c` \u202e\r\n"
    "# h www.a.b http://c.d"
)


def fill(add):
    for vocab, tp_size in ((32768, 2), (131072, 8)):
        for variant, time in (("triton_tp", 0.2274), ("pytorch_tp_manual", 1.5), ("pytorch_gather", 6.23)):
            if tp_size == 2:
                add(variant, time)
            else:
                add(variant, vocab=vocab, tp_size=tp_size, status="skipped", reason="needs 8 GPUs, found 4")
    add("pytorch_gather", status="oom", reason="asked for 4.00 GiB", vocab=65536, tp_size=4)
    add("triton_tp", 0.31, vocab=65536, tp_size=4, loss_value=12.5)
    add("pytorch_gather", compute_dtype="logits", time_ms=2.0, vocab=65536, tp_size=4)
    cpu = {"device": "cpu", "gpu_name": None, "cpu_model": "EPYC 9654", "vocab": 512}
    add("triton_tp", 45000.0, interpreted=True, **cpu)
    add("pytorch_gather", 12.0, **cpu)


@pytest.mark.parametrize("form", TABLES)
def test_golden(add, frame, form, request):
    fill(add)
    made = TABLES[form](pivot(frame()))
    path = GOLDEN / f"small.{SUFFIXES[form]}"
    assert made == path.read_text(encoding="utf-8")


def test_csv_numbers_are_the_rows(add, frame):
    fill(add)
    rows = list(csv.DictReader(io.StringIO(render.comma_separated(pivot(frame())))))
    first = next(row for row in rows if row["vocab"] == "32768")
    assert float(first["triton_tp time_ms"]) == 0.2274
    assert float(first["pytorch_gather x"]) == 6.23 / 0.2274
    assert next(row for row in rows if row["vocab"] == "131072")["triton_tp time_ms"] == "skipped"


@pytest.mark.parametrize("width", [20, 80, 400])
@pytest.mark.parametrize("terminal", [True, False])
def test_no_width_cuts_a_number(add, frame, width, terminal):
    fill(add)
    made = render.pivot_text(frame())
    console = Console(
        file=io.StringIO(), width=width, force_terminal=terminal, color_system="auto" if terminal else None
    )
    render.show(made, console)
    printed = console.file.getvalue()
    assert ("\x1b[" in printed) == terminal
    if not terminal:
        assert printed == f"{made.plain}\n"
    assert "6.230 ms (27.4x)" in printed and "..." not in printed and "\u2026" not in printed


def hostile(add, frame):
    names = {"gpu_name": HOSTILE, "dtype": HOSTILE, "loss": HOSTILE, "block_cap": HOSTILE}
    add(HOSTILE, status="error", reason=HOSTILE, job={HOSTILE: 1}, **names)
    add(HOSTILE, status="error", reason=HOSTILE, job={HOSTILE: HOSTILE}, **names)
    add("triton_tp", 1.0, loss_value=1.0, **names)
    add(HOSTILE, 1.0, loss_value=99.0, **names)
    report = pivot(frame())
    assert report.failures and report.warnings
    return report


def test_hostile_text_in_a_terminal(add, frame):
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None)
    render.show(render.text(hostile(add, frame)), console)
    printed = console.file.getvalue()
    assert not {char for char in printed if not char.isprintable()} - {"\n"}
    assert "[bold]x[/]" in printed


def test_hostile_text_in_markdown(add, frame):
    made = render.markdown(hostile(add, frame))
    assert "<" not in made and "http:" not in made and "**b**" not in made and "`c`" not in made.replace("\\`", "")
    table = [line for line in made.splitlines() if line.startswith("|")]
    assert len({line.replace("\\|", "").count("|") for line in table}) == 1
    assert not any(line.startswith("#") for line in made.splitlines())


def test_hostile_text_in_csv(add, frame):
    rows = list(csv.reader(io.StringIO(render.comma_separated(hostile(add, frame)))))
    assert len({len(row) for row in rows}) == 1
    for row in rows:
        for value in row:
            assert value.isprintable() and not value.startswith(("=", "+", "-", "@"))
