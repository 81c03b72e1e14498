#!/usr/bin/env python3
"""Merge the rows of an output folder into one file: `python -m tpbench compact` without an installation."""

import sys

import _checkout  # noqa: F401  finds the package below

from tpbench.console import information

if __name__ == "__main__":
    sys.exit(information(["compact", *sys.argv[1:]]))
