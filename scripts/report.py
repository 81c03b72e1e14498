#!/usr/bin/env python3
"""Print what was measured: `scripts/report.py outputs --help`."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if (ROOT / "tpbench" / "__init__.py").is_file():  # a checkout: its own package, installed or not
    sys.path.insert(0, str(ROOT))

from tpbench.report.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
