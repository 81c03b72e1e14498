"""Text from rows, made safe for Markdown and spreadsheets."""

from __future__ import annotations

import re

_MARKDOWN = re.compile(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|[\\`*{}\[\]#~$|]|:(?=//)|(?<=\bwww)\.")

_FORMULA = tuple("=+-@\t\r\uff1d\uff0b\uff0d\uff20")  # also the full-width signs, which some spreadsheets accept


def markdown(text: str) -> str:
    """Return Markdown that renders as `text`, also inside a table. Names such as `a_b` stay without a backslash."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKDOWN.sub(lambda match: f"\\{match.group()}", text)


def csv_text(text: str) -> str:
    """Return `text` such that no spreadsheet evaluates it as a formula."""
    return f"'{text}" if text.startswith(_FORMULA) else text
