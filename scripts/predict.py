#!/usr/bin/env python3
"""Predict what was not measured: `python -m tpbench predict` without an installation."""

import sys

import _checkout  # noqa: F401  finds the package below

from tpbench.console import information

if __name__ == "__main__":
    sys.exit(information(["predict", *sys.argv[1:]]))
