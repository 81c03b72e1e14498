"""Imported first by the scripts, so that they work from a checkout with any Python that comes along."""

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / ".venv" / "bin" / "python"

if (ROOT / "tpbench" / "__init__.py").is_file():  # the checkout's own package, installed or not
    sys.path.insert(0, str(ROOT))

if importlib.util.find_spec("pandas") is None and PYTHON.exists() and Path(sys.prefix) != ROOT / ".venv":
    # This Python lacks what is needed, and scripts/run has made one that does not.
    os.execv(PYTHON, [str(PYTHON), *sys.argv])
