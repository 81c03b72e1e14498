"""Parts of messages: suggestions for a wrong name, numbers as text, and text that is safe to print."""

import difflib
import math
import unicodedata
from collections.abc import Iterable

SYNONYMS = {
    "gpu": "cuda",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "ce": "cross_entropy",
    "tp": "tp_size",
    "dp": "dp_size",
    "gpus": "world_size",
    "ranks": "world_size",
}
"""Usual words for a value, each with its name here. Their spelling is not similar, or similar to a wrong name."""


def nearest(name: str, valid: Iterable[str], most: int = 1) -> str:
    """Return `, did you mean X?` with at most so many names, or nothing if no valid name is close."""
    valid = list(valid)
    close = [] if name.isdigit() else difflib.get_close_matches(name, valid, n=most)
    close = close or [word for word in valid if len(name) >= 3 and name in word.replace("_", " ").split()][:most]
    close = [word for word in valid if word.startswith(f"{name} ")][:most] or close
    if (meant := SYNONYMS.get(name.lower())) in valid:
        close = [str(meant)]
    return f", did you mean {' or '.join(filter(None, (', '.join(close[:-1]), close[-1])))}?" if close else ""


def unknown(what: str, name: object, valid: Iterable[str], where: str = "") -> str:
    """Return a sentence for a name that does not exist, with the nearest name and all valid ones.

    With `where`, a place that lists the valid names, the sentence has the three nearest names and that place instead.
    """
    name = name if str(name).strip() else f"{name!r} (is a variable of the shell not set?)"
    valid = sorted(valid, key=lambda word: (not word.isdigit(), int(word) if word.isdigit() else 0, word))
    if where:
        return f"no {what} is called {name!s}{nearest(str(name), valid, most=3)} (all {len(valid)}: {where})"
    return f"no {what} is called {name!s}{nearest(str(name), valid)} (valid: {', '.join(valid)})"


def memory_text(gib: float) -> str:
    """Return an amount of memory in a unit of which it has at least one: `20 KiB` in place of 1.91e-05 GiB."""
    exponent = next((power for power in range(3) if gib * 1024**power >= 1), 2)
    return f"{gib * 1024**exponent:.3g} {('GiB', 'MiB', 'KiB')[exponent]}"


def number(value: float) -> str:
    """Return about four significant digits, without an exponent if that is readable."""
    size = abs(value)
    if not math.isfinite(value) or 0 < size < 0.1 or size >= 1e15:
        return f"{value:.3g}"
    digits = 0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 10 else 3
    return f"{value:.{digits}f}"


def amount(value: float, unit: str) -> str:
    """Return a number with its unit: less than 0.1 GiB in MiB or KiB."""
    return memory_text(value) if unit == "GiB" and 0 < value < 0.1 else f"{number(value)} {unit}".rstrip()


def ratio_text(ratio: float) -> str:
    """Return a ratio such as "2.00x". Beyond a thousand its digits say nothing: one of the two values is near zero."""
    if ratio >= 1000:
        return ">999x"
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.1f}x" if ratio < 100 else f"{ratio:.0f}x"


def counted(number_of: int, what: str) -> str:
    """Return a number with its noun, which gets an `s` unless the number is 1."""
    return f"{number_of} {what}{'' if number_of == 1 else 's'}"


def message(error: BaseException) -> str:
    """Return the message of an error. A class of a user may fail to make one."""
    try:
        return str(error)
    except Exception as failed:
        return f"its message raised {type(failed).__name__}"


def with_lines(sentence: str, lines: str) -> str:
    """Return a reason: a sentence and, if there are any, the last lines of a log."""
    return f"{sentence}; the last lines:\n{lines}" if lines else sentence


def sentence_of(reason: str | None) -> str:
    """Return the first line of a reason, without the announcement of the lines that follow it."""
    return (reason or "").partition("\n")[0].removesuffix("; the last lines:").removesuffix(":")


def printable(text: str, limit: int = 200) -> str:
    """Return a text of unknown origin as one line of about `limit` characters at most, without control characters.

    A text that is too long keeps its start and more of its end: the last lines of a traceback say most.
    """
    if len(text) > 10 * limit:
        text = f"{text[: 2 * limit]} ... {text[-4 * limit :]}"
    kept = "".join(" " if char.isspace() else "" if unicodedata.category(char)[0] == "C" else char for char in text)
    line = " ".join(kept.split())
    return line if len(line) <= limit else f"{line[: limit // 3]} ... {line[-(limit - limit // 3) :]}"


def printable_reason(reason: str, limit: int = 200) -> str:
    """Return a reason as one printable line, in which `|` divides the lines of a log."""
    return printable(reason.replace(":\n", ": ").replace("\n", " | "), limit)
