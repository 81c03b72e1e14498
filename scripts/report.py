#!/usr/bin/env python3
"""Print what was measured: `scripts/report.py outputs --help`."""

import sys

import _checkout  # noqa: F401  finds the package below

from tpbench.report.command import main

if __name__ == "__main__":
    sys.exit(main())
