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
    of_shell = ("TPBENCH_ROWS", "COLUMNS", "MPLBACKEND")  # a notebook shows pictures by a backend of its own
    kept = {name: value for name, value in os.environ.items() if name not in of_shell}
    named = {} if rows is None else {"TPBENCH_ROWS": str(rows)}
    client.execute(env={**kept, **named, "PYTHONWARNINGS": "error::FutureWarning"})
    return notebook.cells


def shown(cells):
    """Return the words of each printed text, table and picture."""
    found = [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in found if output.get("name") == "stderr"], found
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in found]
    return [text.split() for text in texts]


def test_a_fresh_run_gives_the_committed_tables_without_warnings():
    committed = shown(read().cells)
    assert len(committed) > 9 and not [words for words in committed if words[:3] == ["no", "rows", "of"]]
    assert shown(run()) == committed, RUN


def test_rows_of_a_cpu_and_one_workload(tmp_path):
    """Sections of workloads without rows are skipped with one line each. Interpreted rows are left out."""
    row = {"workload": "tp_block", "device": "cpu", "cpu_model": "EPYC 9654", "interpreted": False, "status": "ok"}
    row |= {"job": "{}", "tp_size": 2, "hidden": 64, "time_ms": 5.0, "skew_ms": 0.1}
    rows = [row | {"variant": name, "key": name} for name in ("block_no_tp", "block_tp")]
    rows.append(row | {"variant": "block_fused", "key": "block_fused", "interpreted": True})
    texts = [" ".join(words) for words in shown(run(synthetic.write(rows, tmp_path)))]
    assert "EPYC 9654" in texts[0] and any("block_no_tp" in text for text in texts[1:])
    assert not any("block_fused" in text for text in texts)
    skipped = [text for text in texts if text.startswith("no rows of")]
    assert len(skipped) == 4, texts
    for workload in ("entropy_loss", "linear_loss", "embedding_grad", "train_step"):
        assert any(text.startswith(f"no rows of {workload}") for text in skipped), texts


def test_it_can_be_read_on_a_code_host():
    text = NOTEBOOK.read_text()
    assert len(text) < 1e6
    assert not re.search(r"/(home|root|tmp|Users)/", text)
    code = [cell for cell in read().cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), RUN
    imported = [name for cell in code for name in re.findall(r"(?:import|from) (tpbench\S*)", cell.source)]
    assert imported == ["tpbench"], "the notebook uses public functions only"
