"""The committed pictures are those that the commands of their pages draw."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tpbench.console.pages import COMMANDS, PICTURE, ROOT, pages

SHOWN = re.compile(r"!\[[^\]]*\]\([^)]*(outputs/reference/\w+\.svg)\)")
TEXTS = [page.read_text() for page in pages()]
DRAWN = [(match["script"], match["arguments"], match["file"]) for text in TEXTS for match in PICTURE.finditer(text)]


TOLERANCE = 3.0
"""Points, 72 to the inch, by which versions of matplotlib may place a line or a marker differently."""


def content(svg: str) -> tuple[list[str], list[float]]:
    """Return the texts of a picture, and the coordinates of its lines and markers."""
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    shapes = re.findall(r'<path (?:[^>]*? )?d="([^"]*)"|<use ([^>]*)/>', svg, flags=re.DOTALL)
    numbers = [number for path, use in shapes for number in re.findall(r"(?<![\w#])-?\d+\.?\d*", path or use)]
    return texts, list(map(float, numbers))


def test_each_committed_picture_is_shown_and_has_one_command() -> None:
    committed = sorted(str(file.relative_to(ROOT)) for file in (ROOT / "outputs/reference").glob("*.svg"))
    assert sorted(file for _, _, file in DRAWN) == committed
    assert sorted({file for text in TEXTS for file in SHOWN.findall(text)}) == committed


@pytest.mark.parametrize(("script", "arguments", "file"), DRAWN, ids=[Path(file).name for _, _, file in DRAWN])
def test_a_committed_picture_is_what_its_command_draws(
    script: str, arguments: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(ROOT)
    drawn = tmp_path / "drawn.svg"
    assert COMMANDS[script]([*shlex.split(arguments)[:-1], str(drawn)]) == 0
    texts, places = content(drawn.read_text())
    committed_texts, committed_places = content(Path(file).read_text())
    assert texts == committed_texts, f"draw {file} again"
    assert places == pytest.approx(committed_places, abs=TOLERANCE), f"draw {file} again"


def test_the_content_of_a_picture_is_its_texts_and_its_coordinates() -> None:
    svg = """<path d="M 4.5 252
L 7 -8.25
" style="stroke: #222222; stroke-width: 1.4"/><use xlink:href="#m3bb4" x="74.7" y="20" style="fill: #1668b8"/>
<text x="7" style="font: 9px">tp 2</text>"""
    assert content(svg) == (["tp 2"], [4.5, 252, 7, -8.25, 74.7, 20])
