#!/usr/bin/env python3
"""Print what was measured: `python -m tpbench report` without an installation."""

import sys

import _checkout  # noqa: F401  finds the package below

from tpbench.report.command import main

if __name__ == "__main__":
    sys.exit(main())
