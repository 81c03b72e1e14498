"""`scripts/report.py gallery FOLDER... -o site/`: a static site that compares several machines and needs no network."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tpbench.report.command_line.parser import ReportParser
from tpbench.report.gallery.entry import FIELDS, FILE, read_entry
from tpbench.report.gallery.site import INDEX, write_site
from tpbench.results.printable import printable
from tpbench.settings import JobError


def main(arguments: Sequence[str]) -> int:
    """Run the command, and name the refused rows and files. The exit code is 0, or 2 if the site could not be made."""
    asked = _parser().parse_args(arguments)
    try:
        entries = [read_entry(folder) for folder in asked.folders]
        write_site(entries, asked.output)
    except (JobError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    for entry in entries:
        for fault in entry.faults:
            print(f"report: {entry.title}: {fault}", file=sys.stderr)
        for refusal in entry.refused:
            print(f"report: {entry.title}: refused {printable(refusal.row_id, 100)}: {refusal.reason}", file=sys.stderr)
    print(f"report: wrote {asked.output / INDEX}", file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    fields = "; ".join(f"{name}: {meaning}" for name, meaning in FIELDS.items())
    parser = ReportParser(
        "gallery",
        description="A static site from folders of rows: which variant is the fastest on which machine. Each folder "
        f"has a file {FILE} ({fields}). Rows without the oracle's errors or with errors above the tolerances, "
        "without a floor or faster than it, and of another version of the kernels are refused by name.",
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help=f"a folder of rows with a {FILE}")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="SITE", help="folder of the site")
    return parser
