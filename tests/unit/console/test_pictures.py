"""The committed pictures are those that the commands of their pages draw."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tpbench.console.pages import ROOT, pages
from tpbench.report.command import main as report

PICTURE = re.compile(r"!\[[^\]]*\]\([^)]*outputs/reference/(\w+\.svg)\)")
RESULTS = ("embedding_grad", "linear_loss", "tp_block", "train_step")
"""Pages that begin with a picture and its command."""


def commands(page: Path) -> dict[str, list[str]]:
    """Return the arguments of each `scripts/report.py` command of the page that draws one of its pictures, by file."""
    text = page.read_text()
    lines = text.replace("\\\n", " ").splitlines()
    found = [shlex.split(line)[2:] for line in lines if line.startswith("python scripts/report.py ")]
    drawn = {arguments[arguments.index("-o") + 1]: arguments for arguments in found if "-o" in arguments}
    return {picture: drawn[picture] for picture in PICTURE.findall(text) if picture in drawn}


PICTURES = [(picture, arguments) for page in pages() for picture, arguments in commands(page).items()]


TOLERANCE = 3.0
"""Points, 72 to the inch, by which versions of matplotlib may place a line or a marker differently."""


def content(svg: str) -> tuple[list[str], list[float]]:
    """Return the texts of a picture, and the coordinates of its lines and markers."""
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    shapes = re.findall(r'<path (?:[^>]*? )?d="([^"]*)"|<use ([^>]*)/>', svg, flags=re.DOTALL)
    numbers = [number for path, use in shapes for number in re.findall(r"(?<![\w#])-?\d+\.?\d*", path or use)]
    return texts, list(map(float, numbers))


@pytest.mark.parametrize("page", RESULTS)
def test_a_page_of_results_states_the_command_of_each_of_its_pictures(page: str) -> None:
    file = ROOT / f"tpbench/docs/{page}.md"
    assert list(commands(file)) == PICTURE.findall(file.read_text()) != []


@pytest.mark.parametrize(("picture", "arguments"), PICTURES, ids=[picture for picture, _ in PICTURES])
def test_a_committed_picture_is_what_its_command_draws(
    picture: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(ROOT)
    file = tmp_path / picture
    assert report([*arguments[: arguments.index("-o")], "-o", str(file)]) == 0
    texts, places = content(file.read_text())
    committed_texts, committed_places = content((ROOT / "outputs/reference" / picture).read_text())
    assert texts == committed_texts, f"draw {picture} again"
    assert places == pytest.approx(committed_places, abs=TOLERANCE), f"draw {picture} again"


def test_the_content_of_a_picture_is_its_texts_and_its_coordinates() -> None:
    svg = """<path d="M 4.5 252
L 7 -8.25
" style="stroke: #222222; stroke-width: 1.4"/><use xlink:href="#m3bb4" x="74.7" y="20" style="fill: #1668b8"/>
<text x="7" style="font: 9px">tp 2</text>"""
    assert content(svg) == (["tp 2"], [4.5, 252, 7, -8.25, 74.7, 20])
