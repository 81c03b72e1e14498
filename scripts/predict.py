#!/usr/bin/env python3
"""Predict what was not measured: `scripts/predict.py --help`."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if (ROOT / "tpbench" / "__init__.py").is_file():  # a checkout: its own package, installed or not
    sys.path.insert(0, str(ROOT))

from tpbench.predict.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
