"""Lists of whole numbers on the command line, such as `4,8` and `32k,128k`."""

from __future__ import annotations

import argparse

_FACTORS = {"k": 2**10, "m": 2**20}


def whole_numbers(text: str) -> list[int]:
    """Return the numbers, separated by commas. `128k` is 128 * 1024."""
    return [_whole_number(part.strip()) for part in text.split(",")]


def _whole_number(text: str) -> int:
    factor = _FACTORS.get(text[-1:].lower(), 1)
    digits = text[:-1] if factor > 1 else text
    if not digits.isdecimal() or int(digits) < 1:
        raise argparse.ArgumentTypeError(
            f"{text or 'nothing'} is no whole number of at least 1: write 131072 or 128k, and 4,8 for several"
        )
    return factor * int(digits)
