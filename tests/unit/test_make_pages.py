"""The pages that are made from code and rows: the reference, the list of columns, and tables made from comments."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import ROOT
from tpbench.settings import JobError

sys.path.insert(0, str(ROOT / "scripts"))
make_pages: Any = importlib.import_module("make_pages")
BLOCK, with_tables = make_pages.BLOCK, make_pages.with_tables

COMMAND = "scripts/report.py outputs/reference --metric device_ms --variant liger --format markdown"


@pytest.mark.parametrize("page", ["tpbench/docs/reference.md", "tpbench/docs/columns.md"])
def test_a_page_that_is_made_from_code_is_up_to_date(page: str) -> None:
    text = (ROOT / page).read_text()
    assert text == with_tables(text), "run scripts/make_pages.py"


@pytest.mark.parametrize("path", make_pages.pages(), ids=lambda page: page.name)
def test_every_block_of_a_page_is_understood(path: Path) -> None:
    text = path.read_text()
    blocks = [match["arguments"] for match in BLOCK.finditer(text)]
    tables = [arguments for arguments in blocks if not arguments.endswith(".svg")]
    assert text.count("<!-- ") == len(blocks) + len(tables)
    assert text.count("<!-- end -->") == len(tables)


def test_a_table_is_made_from_its_comment() -> None:
    made = with_tables(f"before\n\n<!-- {COMMAND} -->\n\nafter\n")
    assert "| vocab |" in made
    assert made.startswith("before\n") and made.endswith("\n<!-- end -->\n\nafter\n")
    assert with_tables(made.replace("1.00x", "9.99x")) == made


def test_a_figure_in_a_sentence_is_taken_from_its_row() -> None:
    rows = "<!--= from outputs/reference --loss cross_entropy --only tokens=4096 graph=false -->\n"
    figure = "{rows}takes <!--= device_ms vocab=131072 tp_size={tp}: triton_tp -->{number}<!----> ms".format
    assert with_tables(figure(rows=rows, tp=2, number="9.99")) == figure(rows=rows, tp=2, number="0.400")
    ratio = figure(rows=rows, tp=2, number="1.46").replace(": triton_tp", ": triton_tp exchange=nccl / triton_tp")
    assert "-->1.462<" in with_tables(ratio + rows.replace("cross_entropy", "reverse_kl"))
    assert "-->1.462 (1.448 to 1.476)<" in with_tables(ratio.replace(" / ", " // "))
    assert "-->1.941<" in with_tables(ratio.replace("exchange=nccl / ", "/ tp_size=4 vocab=131072: "))
    with pytest.raises(JobError, match="tp_size=2,4: triton_tp is of 2 rows"):
        with_tables(figure(rows=rows, tp="2,4", number=""))


def test_a_command_that_fails_is_named() -> None:
    with pytest.raises(JobError, match=r"report\.py outputs/reference --variant nonsense\n.*no variant is called"):
        with_tables("<!-- scripts/report.py outputs/reference --variant nonsense -->\n")
