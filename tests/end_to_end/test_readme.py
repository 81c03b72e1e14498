"""Check the README and its pages: links lead somewhere, files exist, every choice is named."""

from __future__ import annotations

import re

from tests.support.command import DEFAULT, ROOT
from tpbench.launcher.command_line.checks import check_overrides
from tpbench.workloads import variants

PAGES = "".join(page.read_text() for page in [ROOT / "README.md", *sorted((ROOT / "tpbench/docs").glob("*.md"))])


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "tpbench/docs").glob("*.md")]:
        for link in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), (page.name, link)


def test_every_script_that_is_named_exists() -> None:
    for name in set(re.findall(r"scripts/[\w.]+", PAGES)):
        assert (ROOT / name).exists(), name


def test_every_variant_and_choice_is_named() -> None:
    choices = [
        file.stem
        for group in ("shape", "model", "loss", "block_cap", "measure")
        for file in (ROOT / "conf" / group).glob("*")
    ]
    for name in [*variants(), *choices]:
        assert re.search(rf"\b{name}\b", PAGES), name


def test_the_default_command_is_understood() -> None:
    """`tests/end_to_end/test_command_line.py` runs it."""
    check_overrides(DEFAULT, ROOT / "conf")
