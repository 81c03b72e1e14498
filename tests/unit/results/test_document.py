"""The page about columns says what the code says."""

from pathlib import Path

from tpbench.results.schema import all_columns, page

PAGE = Path(__file__).parents[3] / "outputs" / "SCHEMA.md"


def test_the_page_is_the_schema():
    assert PAGE.read_text() == page(), "run: python -m tpbench.console.pages"


def test_every_column_is_on_the_page():
    for name, column in all_columns().items():
        assert f"| `{name}` |" in page() and column.doc
