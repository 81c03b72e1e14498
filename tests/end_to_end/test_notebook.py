"""The notebook runs from top to bottom on the reference rows, and on rows made up where there are none yet."""

import os
import re
from pathlib import Path

import pytest

from tests.support import synthetic

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "scripts" / "analysis.ipynb"
REFERENCE = ROOT / "outputs" / "reference"


def run(rows):
    """The notebook's cells after a run."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(NOTEBOOK.parent)}})
    client.execute(env={**os.environ, "TPBENCH_ROWS": str(rows), "PYTHONWARNINGS": "error::FutureWarning"})
    return notebook.cells


def said(cells):
    outputs = [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.get("name") == "stderr"], outputs
    texts = [output.get("text", "") + str(output.get("data", {}).get("text/plain", "")) for output in outputs]
    pictures = sum("image/png" in output.get("data", {}) for output in outputs)
    return "\n".join(texts), pictures


def test_on_made_up_rows(tmp_path):
    text, pictures = said(run(synthetic.write(synthetic.cells(), tmp_path)))
    assert pictures == 2 and "pytorch_gather" in text and "speed-up" in text and "131072" in text


@pytest.mark.skipif(not list(REFERENCE.glob("**/*.parquet")), reason="no reference rows in outputs/reference")
def test_on_the_reference_rows():
    text, pictures = said(run(REFERENCE))
    assert pictures >= 1 and "triton_tp" in text


def test_it_is_committed_without_outputs():
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert len(re.findall(r"\S.*", code[-2].source)) == 3  # the question of one's own
