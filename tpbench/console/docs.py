"""`python -m tpbench docs [PAGE]`: the pages that are shipped with the package."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

import tpbench
from tpbench.settings import JobError
from tpbench.suggestions import unknown
from tpbench.tables import aligned_lines

PAGES = {file.stem: file for file in sorted((Path(tpbench.__file__).resolve().parent / "docs").glob("*.md"))}


def main(arguments: Sequence[str]) -> int:
    """Print a page, or the list of all pages. The exit code is 0. Raises JobError if there is no such page."""
    parser = argparse.ArgumentParser(prog="tpbench docs", description="Print a page of the documentation.")
    parser.add_argument("page", nargs="?", help="without it: the list of the pages")
    name = parser.parse_args(arguments).page
    if name is None:
        titles = [[page, file.read_text("utf-8").partition("\n")[0].lstrip("# ")] for page, file in PAGES.items()]
        print(*aligned_lines(("page", "title"), titles), sep="\n")
    elif name in PAGES:
        print(re.sub(r"<!--.*?-->\n?", "", PAGES[name].read_text("utf-8")), end="")  # without where tables come from
    else:
        raise JobError(unknown("page", name, PAGES))
    return 0
