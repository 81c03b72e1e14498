"""The notebook is committed with its results, and gives the same tables again; it also runs on other rows."""

import os
import re
from pathlib import Path

import pytest

from tests.support import synthetic

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "scripts" / "analysis.ipynb"
RUN = "run: jupyter execute --inplace scripts/analysis.ipynb"


def read():
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    return notebook


def run(rows=None):
    """Return the notebook's cells after a run, on these rows or on the committed ones."""
    nbclient = pytest.importorskip("nbclient")
    notebook = read()
    place = {"metadata": {"path": str(NOTEBOOK.parent)}}
    client = nbclient.NotebookClient(notebook, timeout=240, startup_timeout=240, resources=place)
    kept = {name: value for name, value in os.environ.items() if name != "TPBENCH_ROWS"}
    named = {} if rows is None else {"TPBENCH_ROWS": str(rows)}
    client.execute(env={**kept, **named, "PYTHONWARNINGS": "error::FutureWarning"})
    return notebook.cells


def outputs(cells):
    found = [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in found if output.get("name") == "stderr"], found
    return found


def tables(cells):
    """Return the words of each printed text and each table, without pictures."""
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs(cells)]
    return [text.split() for text in texts if not text.startswith("<Figure")]


def pictures(cells):
    return sum("image/png" in output.get("data", {}) for output in outputs(cells))


def test_on_made_up_rows(tmp_path):
    cells = run(synthetic.write(synthetic.cells(), tmp_path))
    words = [word for table in tables(cells) for word in table]
    assert pictures(cells) == 2 and {"pytorch_gather", "speed-up", "131072"} <= set(words)


def test_a_fresh_run_gives_the_committed_tables():
    committed, fresh = read().cells, run()
    assert len(tables(committed)) > 6 and pictures(committed) == pictures(fresh) == 2
    assert tables(fresh) == tables(committed), RUN


def test_it_can_be_read_on_a_code_host():
    text = NOTEBOOK.read_text()
    assert len(text) < 1e6
    assert not re.search(r"/(home|root|tmp|Users)/", text)
    code = [cell for cell in read().cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), RUN
    assert len(re.findall(r"\S.*", code[-2].source)) == 3  # the question of one's own
