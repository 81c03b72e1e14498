"""Text of unknown origin, made safe to print. A row's reason may hold anything that a process printed."""

from __future__ import annotations

import unicodedata


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
