"""Figures in the running text of a page: each must be printed by a table that a command of the page made.

In a section with tables it must be one of theirs. The answer at the top of a page and sections without tables may quote
every table of the page.

A figure is a number with a unit, or any decimal number. Numbers that share a unit, as in "1.5 to 2 times", are figures
too. A figure may be rounded: "87%" is printed if a table has 86.6%. These numbers are no figures:

- code, link targets, headings and comments;
- versions: a number behind the name of a package, such as "Triton 3.6";
- settings and constants that the page lists in a comment, as they are written: `<!-- not measured: 95%, 1 GiB -->`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_UNITS = {"percent": "%", "x": "times", "seconds": "s"} | {
    unit: unit
    for unit in ("%", "times", "ms", "us", "ns", "s", "KiB", "MiB", "GiB", "GB", "GB/s", "TB/s", "TFLOP/s", "tokens/s")
}
"""Units by spelling."""
_COLUMN_UNITS = {
    "gb_per_s": "GB/s", "tokens_per_s_per_gpu": "tokens/s", "tflops": "TFLOP/s",
    "_ms": "ms", "_s": "s", "_gib": "GiB", "_kib": "KiB",
}  # fmt: skip
"""Units of bare numbers in a table, by the end of the column's name: the first end counts."""

_NUMBER = re.compile(
    rf"""(?<![\w.=])(?<!\w-)        # no part of a word, a version or a date
    (?P<number>\d+(?:,\d{{3}})*(?:\.\d+)?)
    (?:[ ]?(?<![ ](?=x))(?P<unit>{"|".join(sorted(map(re.escape, _UNITS), key=len, reverse=True))})(?!\w))?
    (?![\w=]|[.,]\d)""",
    re.VERBOSE,
)
_JOINED = re.compile(r"[ ,/]*(?:to|and|or|of|against)? ?")
_VERSION = re.compile(
    r"\b(?:torch|triton|python|cuda|nccl|capability|liger|quack|core|deepspeed|transformers|slurm)"
    r"(?: \d[\d.]*,?(?: to| and)?)* $",
    re.IGNORECASE,
)
_BLOCK = re.compile(r"<!-- scripts/(?:(?!\.svg -->)[^\n])*-->\n(.*?)<!-- end -->", re.DOTALL)
_SECTION = re.compile(r"^(?=## )", re.MULTILINE)
_NOT_MEASURED = re.compile(r"<!-- not measured: (.*?) -->", re.DOTALL)
_NO_TEXT = re.compile(rf"{_BLOCK.pattern}|<!--.*?-->|```.*?```|`[^`]*`|\]\([^)]*\)|^#[^\n]*", re.DOTALL | re.MULTILINE)


class Figure(NamedTuple):
    """A number of a page as it is written, its unit ("" if it has none) and its line."""

    number: str
    unit: str
    line: int

    def rounds(self, printed: Figure) -> bool:
        """Return true if this is the printed number, perhaps rounded. A figure without a unit may have any."""
        half_of_last_digit = 0.5 * 10.0 ** -len(self.number.partition(".")[2])
        distance = abs(float(self.number.replace(",", "")) - float(printed.number.replace(",", "")))
        return self.unit in ("", printed.unit) and distance <= half_of_last_digit * (1 + 1e-9)


def unprinted_figures(page: str) -> list[str]:
    """Return "LINE: message" for each figure in a page's running text that none of its section's tables prints."""
    constants = [number for text in _NOT_MEASURED.findall(page) for number in _numbers(text)]
    of_page = _printed_by_tables(page)
    figures, wrong, line = [], [], 0
    for section in _SECTION.split(page):
        printed = _printed_by_tables(section) or of_page
        found = [each._replace(line=line + each.line) for each in _figures(section)]
        wrong += [each for each in found if not any(map(each.rounds, (*printed, *constants)))]
        figures += found
        line += section.count("\n")
    unused = [constant for constant in constants if not any(figure.rounds(constant) for figure in figures)]
    return [
        *(f"{each.line}: no table of its section prints {each.number} {each.unit}".rstrip() for each in wrong),
        *(f"1: the text has no {each.number} {each.unit}, listed as not measured" for each in unused),
    ]


def _printed_by_tables(text: str) -> list[Figure]:
    return [number for block in _BLOCK.findall(text) for number in _printed_numbers(block)]


def _figures(text: str) -> list[Figure]:
    """Return the numbers of a running text that have a unit or a decimal point."""
    running = _NO_TEXT.sub(lambda match: re.sub(r"[^\n]", "_", match[0]), text)
    return [number for number in _numbers(running) if number.unit or "." in number.number]


def _numbers(text: str) -> list[Figure]:
    """Return the numbers of a text, except versions. Numbers joined by words such as "to" share the last unit."""
    text_line = text.replace("\n", " ")
    found: list[Figure] = []
    unit, start = "", len(text)
    for match in reversed([*_NUMBER.finditer(text_line)]):
        shares_unit = _JOINED.fullmatch(text_line, match.end(), start)
        unit, start = _UNITS.get(match["unit"], unit if shares_unit else ""), match.start()
        if not _VERSION.search(text_line, 0, start):
            found.append(Figure(match["number"], unit, text.count("\n", 0, start) + 1))
    return found[::-1]


def _printed_numbers(block: str) -> Iterator[Figure]:
    """Yield the numbers of tables, not of captions and notes. A bare number has the unit of its column."""
    if block.lstrip().startswith("```"):
        yield from _numbers(block)
    heads: list[str] = []
    for line in block.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        heads = heads if len(heads) == len(cells) else cells
        for head, cell in zip(heads, cells, strict=True):
            unit = next((unit for end, unit in _COLUMN_UNITS.items() if head.endswith(end)), "")
            yield from (number._replace(unit=number.unit or unit) for number in _numbers(cell))
