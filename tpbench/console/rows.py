"""`tpbench rows PLACE`: delete the rows that filters select, or copy them into another output folder."""

import sys
from collections.abc import Sequence
from pathlib import Path

from tpbench.report import command_line
from tpbench.results.compact import copy_rows, remove_rows
from tpbench.settings import JobError, user_path
from tpbench.suggestions import counted, printable


def main(arguments: Sequence[str]) -> int:
    """Run the command. Return 0, or 1 if the user answers no. Raises JobError for a wrong request."""
    parser = command_line.ReportParser(
        "rows",
        (),
        description="Delete the rows that the filters select, or copy them into the rows of another output folder. "
        "No sweep may run in these folders.",
        epilog="tpbench rows outputs --only sweep_id=ID --delete    |    tpbench rows A B --into BOTH",
    )
    parser.add_filters()
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--delete", action="store_true", help="delete them, after a question")
    what.add_argument("--into", type=user_path, metavar="FOLDER", help="copy them into FOLDER/rows, as one file")
    parser.add_argument("--yes", action="store_true", help="answer the question of --delete with yes")
    options = parser.parse_args(arguments)
    if len(places := options.where) == 1 and (own := Path(places[0], "rows")).is_dir():
        places = [str(own)]  # not the reference rows beside it
    frame = command_line.selected_rows(options, command_line.read_rows(places))
    where, ids = printable(", ".join(places)), frozenset(frame["row_id"].astype(str))
    sweeps = f"{counted(len(ids), 'row')} of {counted(frame['sweep_id'].nunique(), 'sweep')} in {where}"
    if options.into:
        file = copy_rows(places, ids, options.into)
        print(f"copied {sweeps} into {printable(str(file))}")
        return 0
    if not options.yes:
        if not sys.stdin.isatty():
            raise JobError(f"{sweeps} would be deleted: nobody can answer a question here, so add --yes")
        if input(f"Delete {sweeps} for ever? [y/N] ").strip().lower() not in ("y", "yes"):
            return 1
    remove_rows(places, ids)
    print(f"deleted {sweeps}")
    return 0
