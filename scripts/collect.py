#!/usr/bin/env python3
"""Store the rows of a sweep that Slurm runs: `python -m tpbench collect` without an installation."""

import sys

import _checkout  # noqa: F401  finds the package below

from tpbench.launcher.slurm.submitted import main

if __name__ == "__main__":
    sys.exit(main())
