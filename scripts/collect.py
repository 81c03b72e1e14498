#!/usr/bin/env python3
"""See what became of a sweep that was left to Slurm: `scripts/collect.py --help`."""

import sys

import _checkout  # noqa: F401  finds the package below

from tpbench.launcher.slurm.collect import main

if __name__ == "__main__":
    sys.exit(main())
