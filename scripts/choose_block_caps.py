#!/usr/bin/env python3
"""Print the choices of block_cap=auto, tpbench/kernels/block_caps.json, from rows of -m +experiment=block_cap_sweep.

scripts/choose_block_caps.py ROWS... > block_caps.json
"""

import argparse
import json
import sys

import _checkout  # noqa: F401  finds the package below

from tpbench.report.command_line import read_rows
from tpbench.results.read import plain_rows
from tpbench.settings import JobError
from tpbench.workloads.entropy_loss.winners import choose


def main() -> int:
    """Run the command. Return 0, or 2 if no block cap can be chosen from the rows."""
    parser = argparse.ArgumentParser(prog="choose_block_caps.py", description=__doc__.partition("\n")[0])
    parser.add_argument("rows", nargs="+", help="folders, files or globs of rows, of one kind of machine")
    asked = parser.parse_args()
    try:
        chosen = choose(plain_rows(read_rows(asked.rows)), ", ".join(asked.rows))
    except JobError as error:
        print(f"choose_block_caps.py: {error}", file=sys.stderr)
        return 2
    entries = ",\n".join(f"    {json.dumps(each)}" for each in chosen["winners"])
    print(f'{{\n  "measured_on": {json.dumps(chosen["measured_on"])},\n  "winners": [\n{entries}\n  ]\n}}')
    return 0


if __name__ == "__main__":
    sys.exit(main())
