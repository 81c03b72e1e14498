"""Text from rows, made safe to print. A row's reason may hold anything that a process printed."""

from __future__ import annotations

import re
import unicodedata

_MARKDOWN = re.compile(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|[\\`*{}\[\]#~$|]|:(?=//)|(?<=\bwww)\.")

_FORMULA = tuple("=+-@\t\r\uff1d\uff0b\uff0d\uff20")  # also the full-width signs, which some spreadsheets accept


def printable(text: str, limit: int = 200) -> str:
    """Return `text` as one line of about `limit` characters at most, without control characters.

    Direction marks and broken surrogates are removed too. A text that is too long keeps its start and more of its end,
    because the last lines of a traceback say most.
    """
    if len(text) > 10 * limit:
        text = f"{text[: 2 * limit]} ... {text[-4 * limit :]}"
    kept = "".join(" " if char.isspace() else "" if unicodedata.category(char)[0] == "C" else char for char in text)
    line = " ".join(kept.split())
    return line if len(line) <= limit else f"{line[: limit // 3]} ... {line[-(limit - limit // 3) :]}"


def markdown(text: str) -> str:
    """Return Markdown that renders as `text`, also inside a table. Names such as `a_b` stay without a backslash."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKDOWN.sub(lambda match: f"\\{match.group()}", text)


def csv_text(text: str) -> str:
    """Return `text` such that no spreadsheet evaluates it as a formula."""
    return f"'{text}" if text.startswith(_FORMULA) else text
