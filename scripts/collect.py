#!/usr/bin/env python3
"""See what became of a sweep that was left to Slurm: `scripts/collect.py --help`."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if (ROOT / "tpbench" / "__init__.py").is_file():  # a checkout: its own package, installed or not
    sys.path.insert(0, str(ROOT))

from tpbench.launcher.slurm.collect import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
