"""The reference page says what the code says."""

from __future__ import annotations

from pathlib import Path

from tpbench.console.reference import page

PAGE = Path(__file__).parents[3] / "tpbench" / "docs" / "reference.md"


def test_the_page_is_generated_from_the_code() -> None:
    assert PAGE.read_text() == page(), "run: python -m tpbench.console.reference > tpbench/docs/reference.md"
