#!/usr/bin/env python3
"""Merge the rows of an output folder into one file, which reads faster. May run beside a sweep.

scripts/compact.py [OUTPUT_DIR]
"""

import argparse
import sys

import _checkout  # noqa: F401  finds the package below

from tpbench.results.compact import Busy, compact


def main() -> int:
    """Run the command. Return 0, or 1 if the rows cannot be merged."""
    parser = argparse.ArgumentParser(prog="compact.py", description=__doc__.partition("\n")[0])
    parser.add_argument("output_dir", nargs="?", default="outputs", help="default: outputs")
    try:
        report = compact(parser.parse_args().output_dir)
    except (OSError, Busy) as error:
        print(f"compact.py: {error}", file=sys.stderr)
        return 1
    for complaint in report.complaints:
        print(f"compact.py: {complaint}", file=sys.stderr)
    print(f"{report.rows} rows merged; {report.files_before} files before, {report.files_after} now")
    return 0


if __name__ == "__main__":
    sys.exit(main())
