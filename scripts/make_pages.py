#!/usr/bin/env python3
"""Write what pages show from the code and from the committed rows, and draw their pictures.

A table in a page is a block. It begins with a comment that holds a command, or the name of one of `LISTS`, which are
made from the code. Its output follows, which is replaced, and then the comment "end". A new block needs only its first
comment. A comment whose command ends with an .svg file draws a picture of the page, and has no output.

A figure in a sentence comes from rows, too. It stands between `<!--= METRIC NAME=VALUE ...: LABEL -->` and `<!---->`.
With ` / LABEL` after the label it is the ratio to another row, with ` // LABEL` the ratio and its interval, with
` - LABEL` the difference. That row has the same facts, unless others stand before its label. A page names the rows of
the figures that follow, as arguments of `report`: `<!--= from ARGUMENTS -->`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

import pandas as pd
from _checkout import ROOT

from tpbench.console import information
from tpbench.console.listing import all_fields, sections_of
from tpbench.report.analysis.comparison import compare
from tpbench.report.analysis.row_values import Record, metric
from tpbench.report.command_line import ReportParser, selected_rows
from tpbench.report.studies import column_cell
from tpbench.results.current_rows import newest
from tpbench.results.read import plain_rows
from tpbench.results.schema import COMMON_COLUMNS, STATUSES, workload_columns
from tpbench.settings import JobError
from tpbench.suggestions import number
from tpbench.tables import Document, Table, as_markdown
from tpbench.workloads import NAMES

BLOCK = re.compile(
    r"(?P<head><!-- (?P<program>scripts/report\.py |python -m tpbench )?(?P<arguments>(?!end -->)[^\n]*) -->\n)"
    r"(?:(?:(?!<!--).)*<!-- end -->\n)?",
    flags=re.DOTALL,
)
FIGURE = re.compile(r"(?P<head><!--= (?P<metric>\w+) (?P<facts>[^:>]*): (?P<label>[^>]*) -->)[^<]*<!---->")
OPERATION = re.compile(r" (//?|-) ")
ROWS = re.compile(r"<!--= from ([^>]*) -->\n")


def pages() -> list[Path]:
    """Return the pages with tables and figures from code and rows. They exist only in a checkout."""
    guides = sorted((ROOT / "tpbench/docs").glob("*.md"))
    return [ROOT / "README.md", *guides, ROOT / "tpbench/kernels/README.md", *sorted((ROOT / "outputs").glob("*.md"))]


def with_tables(text: str) -> str:
    """Return the text of a page with each block's output and each figure as they are today, and draw its pictures.

    Raises JobError if a command fails, or if a figure isn't of one row.
    """

    def made(match: re.Match[str]) -> str:
        output = _output(match["program"], match["arguments"])
        return match["head"] if match["arguments"].endswith(".svg") else f"{match['head']}\n{output}\n<!-- end -->\n"

    def figure(match: re.Match[str]) -> str:
        *_, rows = "", *ROWS.findall(match.string, 0, match.start())
        name, facts = match["metric"], match["facts"]
        first, *more = OPERATION.split(match["label"])
        record = _record(rows, facts, first)
        if not more:
            return f"{match['head']}{column_cell(name, record).text}<!---->"
        own, _, label = more[1].rpartition(": ")
        reference = _record(rows, own or facts, label)
        one, other = float(record[name]), float(reference[name])
        text = number(one / other if "/" in more[0] else one - other)
        if more[0] == "//":
            ratio = compare([reference], [record], metric(name))
            if not (ratio and ratio.low and ratio.high):
                raise JobError(f"the ratio of {facts}: {match['label']} has no interval")
            text += f" ({number(ratio.low)} to {number(ratio.high)})"
        return f"{match['head']}{text}<!---->"

    return FIGURE.sub(figure, BLOCK.sub(made, text))


def _filters(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the places and the filters among arguments of `report`."""
    parser = ReportParser("report", ())
    parser.add_filters()
    return parser.parse(arguments)


@functools.cache
def _rows(arguments: str) -> pd.DataFrame:
    """Return the rows that these arguments of `report` select, for all figures of a page."""
    with contextlib.chdir(ROOT):
        return selected_rows(_filters(shlex.split(arguments)))


def _record(arguments: str, facts: str, label: str) -> Record:
    """Return the one row of these rows that has the label and the facts, NAME=VALUE with spaces between."""
    filters = _filters(["--label", label, "--only", *facts.split()])
    found = plain_rows(newest(selected_rows(filters, _rows(arguments))))
    if len(found) != 1:
        raise JobError(f"the figure of {facts}: {label} is of {len(found)} rows")
    return Record(found[0])


def _output(program: str | None, arguments: str) -> str:
    """Return what a command prints, or a list. Output that is not Markdown becomes a code block."""
    if program is None:
        return LISTS[arguments]()
    words = [*(["report"] if "report" in program else []), *shlex.split(arguments)]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = information(words)
    if code == JobError.exit_code:  # 1 is an answer: `predict --validate` misses an aim
        raise JobError(f"{program}{arguments}\n{err.getvalue()}")
    return out.getvalue() if "--format markdown" in arguments else f"```text\n{out.getvalue()}```\n"


def _columns() -> str:
    added = workload_columns()  # also of users' files of which this process has read rows
    sections = {"Every row": COMMON_COLUMNS} | {f"Further columns of {name}": added[name] for name in NAMES}
    rows = {
        title: [(column.name, _TYPES.get(column.type, ""), column.unit, column.doc) for column in columns.values()]
        for title, columns in sections.items()
    }
    return _tables(("column", "type", "unit", "meaning"), rows)


def _tables(columns: Sequence[str], sections: Mapping[str, Iterable[Sequence[str]]]) -> str:
    return as_markdown(Document([Table(title, columns, list(rows)) for title, rows in sections.items()]))


LISTS: dict[str, Callable[[], str]] = {
    "choices": lambda: _tables(
        ("name", "meaning"),
        {title: [(entry.name, entry.summary) for entry in entries] for title, entries in sections_of("all", gpus=0)},
    ),
    "fields": lambda: f"```text\n{all_fields()}```\n",
    "columns": _columns,
    "statuses": lambda: _tables(("status", "meaning"), {"": STATUSES.items()}),
}
"""Lists that are made from the code, by name."""
_TYPES = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    datetime: "time, UTC",
    list: "list of numbers",
}


def main() -> int:
    """Write the pages and draw their pictures. Return 0."""
    written = {page: with_tables(page.read_text(encoding="utf-8")) for page in pages()}
    for page, text in written.items():
        if page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8")
            print(f"wrote {page.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except JobError as error:
        sys.exit(f"pages: {error}")
