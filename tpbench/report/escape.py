"""Text from rows made harmless. A reason may be anything that a process printed: none of it may act on a reader."""

from __future__ import annotations

import re
import unicodedata

_MARKDOWN = re.compile(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|[\\`*{}\[\]#~$|]|:(?=//)|(?<=\bwww)\.")

_FORMULA = tuple("=+-@\t\r\uff1d\uff0b\uff0d\uff20")  # the wide forms too, which some spreadsheets read alike


def plain(text: str, limit: int = 200) -> str:
    """One line of at most about `limit` characters, without anything that a terminal or a page would obey.

    Control characters, direction marks and broken surrogates go. What is too long keeps its start and, as with the
    last lines of a traceback, more of its end.
    """
    if len(text) > 10 * limit:
        text = f"{text[: 2 * limit]} ... {text[-4 * limit :]}"
    kept = "".join(" " if char.isspace() else "" if unicodedata.category(char)[0] == "C" else char for char in text)
    line = " ".join(kept.split())
    return line if len(line) <= limit else f"{line[: limit // 3]} ... {line[-(limit - limit // 3) :]}"


def markdown(text: str) -> str:
    """Text that renders as itself, in a table's cell too. `a_b` needs no backslash and stays readable."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKDOWN.sub(lambda match: f"\\{match.group()}", text)


def csv_text(text: str) -> str:
    """Text that no spreadsheet takes for a formula."""
    return f"'{text}" if text.startswith(_FORMULA) else text
