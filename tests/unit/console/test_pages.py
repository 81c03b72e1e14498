"""The tables of the pages are those that their commands print, and every figure of the text is in a table."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tpbench.console.page_figures import unprinted_figures
from tpbench.console.pages import BLOCK, PICTURE, ROOT, main, name, pages, with_tables
from tpbench.report.command_line import read_rows
from tpbench.settings import JobError

READ_ONCE = functools.cache(read_rows)
COMMAND = "scripts/report.py outputs/reference --metric device_ms --variant quack --format markdown"


@pytest.fixture(autouse=True)
def rows_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share the committed rows between commands: reading takes most of their time."""
    monkeypatch.setattr("tpbench.report.command_line.read_rows", lambda places: READ_ONCE(tuple(places)).copy())


def page(text: str) -> str:
    """Return a page with the text in its first line, and a table."""
    table = "(2.00x): a legend\n\n| vocab | quack |\n| --- | --- |\n| 32768 | 0.1534 ms (1.04x) |\n"
    return f"{text}\n\n<!-- {COMMAND} -->\n\n{table}\n<!-- end -->\n"


@pytest.mark.parametrize("path", pages(), ids=name)
def test_tables_are_what_their_commands_print(path: Path) -> None:
    text = path.read_text()
    assert text.count("<!-- scripts/") == len(BLOCK.findall(text)) + len(PICTURE.findall(text))
    assert text.count("<!-- end -->") == len(BLOCK.findall(text))
    assert with_tables(text) == text, "run: python -m tpbench.console.pages"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_a_table_is_made_from_its_comment() -> None:
    made = with_tables(f"before\n\n<!-- {COMMAND} -->\n\nafter\n")
    assert "| vocab |" in made
    assert made.startswith("before\n") and made.endswith("\n<!-- end -->\n\nafter\n")
    assert with_tables(made.replace("1.00x", "9.99x")) == made


def test_a_command_that_fails_is_named() -> None:
    with pytest.raises(JobError, match=r"report\.py outputs/reference --variant nonsense\n.*quack"):
        with_tables("<!-- scripts/report.py outputs/reference --variant nonsense -->\n")


@pytest.mark.parametrize("path", pages(), ids=name)
def test_figures_of_the_text_are_printed_by_tables(path: Path) -> None:
    assert unprinted_figures(path.read_text()) == []


@pytest.mark.parametrize(
    "text",
    [
        "It takes 0.153 ms, 0.15 ms or 0.1534 ms.",
        "A ratio of 1.04x or 1 times; a number of 1.04. From 0.15 to 0.153 ms",
        "Triton 3.6 to 3.9, torch 2.11.0, 7 x 8 blocks, on 2026-11-21, `9.9 ms` in code, [7](7.1) and 4096 tokens",
        "# 7 ms",
        "About 3 us and 0.153 ms <!-- not measured: 3 us -->",
    ],
)
def test_a_page_passes(text: str) -> None:
    assert unprinted_figures(page(text)) == []


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("It takes 0.154 ms.", "0.154 ms"),
        ("0.16\nms", "0.16 ms"),
        ("0.1530 ms", "0.1530 ms"),
        ("0.153 GiB", "0.153 GiB"),
        ("1.05x", "1.05 times"),
        ("1.04%", "1.04 %"),
        ("2.00x", "2.00 times"),
        ("7.5", "7.5"),
        ("| 0.3 |", "0.3"),
        ("7 to 0.153 ms", "7 ms"),
        ("32,768 times", "32,768 times"),
    ],
)
def test_a_figure_that_no_table_prints_is_found(text: str, missing: str) -> None:
    assert unprinted_figures(page(text)) == [f"1: no table of its section prints {missing}"]


def test_a_section_with_a_table_quotes_only_that() -> None:
    other = page("").replace("0.1534", "0.25").replace("1.04x", "2.00x")
    one, three = "0.153 ms, 0.25 ms", "0.25 ms, 0.4 ms"
    text = f"0.153 ms and 0.25 ms\n\n## One\n{page(one)}\n## Two\n{other}\n## Three\n{three}\n"
    line_of = {line: number for number, line in enumerate(text.splitlines(), start=1)}
    assert unprinted_figures(text) == [
        f"{line_of[one]}: no table of its section prints 0.25 ms",
        f"{line_of[three]}: no table of its section prints 0.4 ms",
    ]


def test_figures_of_a_code_block_that_a_command_printed_count() -> None:
    printed = "```text\npytorch_tp_manual  3.830 ms +-22%\n```"
    text = f"3.8 ms\n<!-- scripts/predict.py --tp 8 -->\n\n{printed}\n\n<!-- end -->\n"
    assert unprinted_figures(text) == []
    assert len(unprinted_figures(text.replace("3.830", "3.930"))) == 1


def test_numbers_of_a_table_have_the_unit_of_their_column() -> None:
    table = "| vocab | peak_gib |\n| ---: | ---: |\n| 7 | 1.500 |\n"
    text = f"7 GiB and\n1.5 GiB or 1.5 ms\n<!-- {COMMAND} -->\n{table}<!-- end -->\n"
    assert [message.split(":")[0] for message in unprinted_figures(text)] == ["1", "2"]
    assert unprinted_figures(text)[1].endswith("1.5 ms")


def test_a_constant_that_the_text_lacks_is_found() -> None:
    assert unprinted_figures("<!-- not measured: 95% -->\n") == ["1: the text has no 95 %, listed as not measured"]


def test_the_command_rewrites_pages_and_names_wrong_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "page.md"
    picture = tmp_path / "picture.svg"
    draw = f"{COMMAND.replace('markdown', 'svg')} --plot device_time -o {picture}"
    file.write_text(f"7 ms\n\n<!-- {draw} -->\n\n<!-- {COMMAND} -->\n")
    monkeypatch.setattr("tpbench.console.pages.pages", lambda: [file])
    assert main() == 1
    assert file.read_text() == with_tables(file.read_text())
    assert file.read_text().count("<!-- end -->") == 1 and "<svg" in picture.read_text()
    assert "page.md:1: no table of its section prints 7 ms" in capsys.readouterr().out
