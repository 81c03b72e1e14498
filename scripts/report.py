#!/usr/bin/env python3
"""Print what was measured: `python -m tpbench report` without an installation."""

import sys

import _checkout  # noqa: F401  finds the package below

from tpbench.console import information

if __name__ == "__main__":
    sys.exit(information(["report", *sys.argv[1:]]))
