#!/usr/bin/env python3
"""Predict what was not measured: `python -m tpbench predict` without an installation."""

import sys

import _checkout  # noqa: F401  finds the package below

from tpbench.predict.command import main

if __name__ == "__main__":
    sys.exit(main())
